"""Secure aggregation by two servers, of which neither alone can compute a sum or see an upload.

A client splits its upload, in fixed point mod 2^32, into two shares that add up to it. The leader
gets one; the helper gets, sealed to its key, the seed of the other. Each share alone is random. Each
server adds the shares of the same reports, and the two sums add up to the sum of the uploads.

This does not protect against:
- two servers that combine what they know;
- a malicious client: within the limit of a coordinate it may report anything, since there are no
  proofs of ranges or norms, and clients clip their own uploads;
- a leader that invents clients: anyone can seal a seed, so the operator of a helper has to know by
  other means that the clients it counts exist, such as the signatures of sites in a deployment;
- a leader that gives clients the key of a helper of its own: clients have to receive the key in
  another way;
- what a sum itself reveals, above all a sum of few reports, or one in which a single report has almost
  all the weight: noise has to hide that, which the helper can add before the leader sees a sum.
"""

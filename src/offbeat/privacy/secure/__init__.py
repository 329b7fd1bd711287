"""Secure aggregation by two servers, of which neither alone can compute a sum or see an upload.

A client splits its upload, in fixed point mod 2^32, into two shares that add up to it. The leader
gets one; the helper gets, sealed to its key, the seed of the other. Each share alone is random. Each
server adds the shares of the same reports, and the two sums add up to the sum of the uploads.

What this does not protect against:
- two servers that put together what they have;
- a client that lies: within the limit of a coordinate it may report anything, for there are no
  proofs of ranges or norms; clipping is the client's own;
- a leader that makes clients up: anybody can seal a seed, so whoever runs a helper has to know by
  other means that the clients it counts exist, such as the signatures of sites in a deployment;
- a leader that hands clients the key of a helper of its own: they have to be given the key by
  somebody else;
- what a sum itself tells, above all a sum of few reports, or one where a single report has almost
  all the weight: that is for noise to hide, which the helper can add before the leader sees a sum.
"""

"""A site's part in a secure sum, and what it refuses to take part in."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from offbeat.aggregate.mean import SecureEncoding
from offbeat.aggregate.secure import clipping_digest, read_terms, weights_text, write_terms
from offbeat.aggregate.uploads import SecretShares, clip_uploads
from offbeat.algorithms.fedopt import Upload
from offbeat.core import Task
from offbeat.deploy import keys
from offbeat.deploy.keys import SIGNATURE_BYTES, fingerprint, read_signer, signed_statement, verify_signature
from offbeat.deploy.protocol.messages import (
    TaskMessage,
    UploadMessage,
    encode_message,
    message_digest,
    pack,
    specs_of,
)
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.server.validation import secure_validator, validate_upload
from offbeat.deploy.site import secure_encode as site_encode
from offbeat.deploy.site.secure_encode import read_helper_key
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import (
    NO_MESSAGE,
    SEALED_BYTES,
    answered_message,
    decode,
    expand_seed,
    unseal,
)
from offbeat.privacy.secure.terms import BindingError, LengthError, RunError, SecureTerms
from offbeat.schedule.staleness import Equal, Hinge, Polynomial, StalenessWeights
from secure_world import KEY

TASK = Task(2, 5, 7)
SEED = 3
PUBLIC = KEY.public_key().public_bytes_raw().hex()
FACTS: dict[str, Any] = {
    "run": "00ff",
    "length": 3,
    "most": 10,
    "minimum": 5,
    "bits": 16,
    "weight_bits": 8,
    "weights": "polynomial:0.5",
    "stochastic": False,
    "key": PUBLIC,
    "signed": False,
    "bounds": None,
    "moving": [],
    "noise": None,
}
UPLOAD = (torch.tensor([0.5, -0.25]), torch.tensor(3.0))


def read_secure_request(
    facts: dict[str, Any] | None, pinned: str | None = PUBLIC, minimum: int | None = 2
) -> site_encode.SecureRequest:
    """By a site that was given the helper's key."""
    return site_encode.read_secure_request(facts, pinned, minimum)


def secure_encode(
    upload: Any, statistics: Any, task: Task, facts: dict[str, Any], seed: int, sign: Any, *others: Any
) -> list[torch.Tensor]:
    """By a site that was given the helper's key."""
    before, pinned, minimum, message = (*others, *({}, PUBLIC, 2, NO_MESSAGE)[len(others) :])
    request = site_encode.read_secure_request(facts, pinned, minimum)
    return site_encode.secure_encode(upload, statistics, task, request, seed, sign, before or {}, message)


def opened(leaves: list[torch.Tensor], terms: SecureTerms, task: Task = TASK) -> torch.Tensor:
    """What the two servers could find together."""
    share, sealed, _ = leaves
    total = share.numpy().view(np.uint32).copy()
    for place, numbers in expand_seed(unseal(sealed.numpy().tobytes(), task, terms, KEY), terms.length):
        total[place] += numbers
    return decode(total, 2.0**-terms.bits)


def test_what_leaves_a_site_are_a_share_and_a_sealed_seed() -> None:
    leaves = secure_encode(UPLOAD, {}, TASK, FACTS, SEED, None)
    assert specs_of(leaves) == (("int32", (3,)), ("uint8", (SEALED_BYTES,)), ("uint8", (0,)))
    assert opened(leaves, read_secure_request(FACTS).terms).tolist() == [0.5, -0.25, 3.0]
    again = secure_encode(UPLOAD, {}, TASK, FACTS, SEED, None)
    assert not torch.equal(leaves[0], again[0])


@pytest.mark.parametrize("moving", [[], ["delta"]])
def test_bounds_are_kept_at_the_site_as_they_are_at_a_server(moving: list[str]) -> None:
    upload = Upload(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]))
    facts = FACTS | {"length": 4 + len(moving), "bounds": {"delta": 2.5, "stamp": None}, "moving": moving}
    leaves = secure_encode(upload, {}, TASK, facts, SEED, None)
    stacked = Upload(upload.delta[None], upload.stamp[None])
    wanted = clip_uploads(stacked, {"delta": 2.5, "stamp": math.inf}, moving)
    flat = torch.cat(
        [wanted.uploads.delta[0], wanted.uploads.stamp[0], *(a[0] for a in [wanted.answers] if moving)]
    )
    found = opened(leaves, read_secure_request(facts).terms)
    assert (found - flat).abs().max() <= 2.0**-17
    assert found[:2].norm() <= 2.5 + 2.0**-16
    assert found[4:].tolist() == [-0.5] * len(moving)


def test_what_is_too_large_for_a_sum_is_refused_without_a_word_on_how_large() -> None:
    for bits, most in ((30, 10), (16, 2**20)):  # a server may ask for any
        with pytest.raises(InputError, match="the upload has a number beyond") as caught:
            secure_encode(
                (torch.tensor([0.5, 77.125, 0.25]),),
                {},
                TASK,
                FACTS | {"bits": bits, "most": most},
                SEED,
                None,
            )
        assert "77" not in str(caught.value)


def test_rounding_at_random_follows_from_seed_client_and_visit() -> None:
    upload = (torch.full((500,), 0.3),)
    facts = FACTS | {"length": 500, "bits": 1, "stochastic": True}
    terms = read_secure_request(facts).terms
    first = opened(secure_encode(upload, {}, TASK, facts, SEED, None), terms)
    assert torch.equal(first, opened(secure_encode(upload, {}, TASK, facts, SEED, None), terms))
    other = TASK._replace(visit=8)
    assert not torch.equal(first, opened(secure_encode(upload, {}, other, facts, SEED, None), terms, other))
    assert set(first.tolist()) == {0.0, 0.5}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"minimum": 1}, "hides nobody"),
        ({"minimum": 0}, "hides nobody"),
        ({"most": 4}, "can never be 5 clients"),
        ({"bits": 31}, "fractional bits"),
        ({"weight_bits": 17}, "0 to 16 bits"),
        ({"length": 0}, "nothing to sum"),
        ({"length": 3.0}, "whole number as length"),
        ({"length": True}, "whole number as length"),
        ({"length": 2**70}, "whole number as length"),
        ({"most": "10"}, "whole number as most"),
        ({"run": ""}, "name of a run"),
        ({"run": "0"}, "name of a run"),
        ({"run": "FF"}, "name of a run"),
        ({"run": None}, "name of a run"),
        ({"weights": "polynomial"}, "which are written polynomial:0.5"),
        ({"weights": "nothing"}, "unknown staleness weights"),
        ({"weights": 5}, "a rule of weights"),
        ({"weights": "a\nb"}, "a rule of weights"),
        ({"stochastic": 0}, r"Expected `bool`.*stochastic"),
        ({"signed": None}, r"Expected `bool`.*signed"),
        ({"key": PUBLIC[:-1]}, "matching regex.*key"),
        ({"key": "g" * 64}, "matching regex.*key"),
        ({"key": None}, "Expected `str`.*key"),
        ({"bounds": []}, r"Expected `object.*bounds"),
        ({"bounds": {}}, "length >= 1.*bounds"),
        ({"bounds": {"upload": 0}}, "> 0.*bounds"),
        ({"bounds": {"upload": -1.0}}, "> 0.*bounds"),
        ({"bounds": {"upload": True}}, "Expected `float.*bounds"),
        ({"bounds": {"upload": "1"}}, "Expected `float.*bounds"),
        ({"moving": ["delta"]}, "a bound that they do not have"),
        ({"moving": [5]}, "Expected `str`.*moving"),
        ({"moving": None}, "Expected `array`.*moving"),
        ({"more": 1}, r"missing or unknown fields \(more\)"),
    ],
)
def test_terms_that_hide_nothing_or_are_none_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises((InputError, Rejected), match=sentence):
        secure_encode(UPLOAD, {}, TASK, FACTS | wrong, SEED, None)


@pytest.mark.parametrize("name", FACTS)
def test_terms_that_leave_something_out_are_refused(name: str) -> None:
    facts = {key: value for key, value in FACTS.items() if key != name}
    with pytest.raises(InputError, match=rf"missing or unknown fields \({name}\)"):
        secure_encode(UPLOAD, {}, TASK, facts, SEED, None)


def test_an_upload_that_does_not_fit_is_refused_before_anything_leaves() -> None:
    for value in (math.nan, math.inf, 1e6):
        with pytest.raises(InputError, match="beyond 12\\.8"):
            secure_encode((torch.tensor([0.0, value, 0.0]),), {}, TASK, FACTS, SEED, None)
    with pytest.raises(LengthError, match="2 numbers, not the 3"):
        secure_encode((torch.zeros(2),), {}, TASK, FACTS, SEED, None)
    facts = FACTS | {"bounds": {"other": 1.0}}
    with pytest.raises(InputError, match="field delta has no bound"):
        secure_encode(Upload(torch.zeros(2), torch.zeros(1)), {}, TASK, facts, SEED, None)


def test_statistics_that_changed_would_leave_in_plain_sight_and_are_refused() -> None:
    before = {"mean": torch.zeros(2)}
    secure_encode(UPLOAD, {"mean": torch.zeros(2)}, TASK, FACTS, SEED, None, before)
    for after, start in (({"mean": torch.ones(2)}, before), (before, None), (before, {})):
        with pytest.raises(InputError, match="the running statistic mean would be sent unprotected"):
            secure_encode(UPLOAD, after, TASK, FACTS, SEED, None, start)


def test_a_site_that_was_given_the_helpers_key_takes_no_other(tmp_path: Path) -> None:
    (tmp_path / "helper.pub").write_text(f"{PUBLIC}\n")
    pinned = read_helper_key(tmp_path / "helper.pub")
    secure_encode(UPLOAD, {}, TASK, FACTS, SEED, None, None, pinned)
    with pytest.raises(InputError, match="names another helper"):
        secure_encode(UPLOAD, {}, TASK, FACTS | {"key": "00" * 32}, SEED, None, None, pinned)
    with pytest.raises(InputError, match="secure aggregation only"):
        read_secure_request(None, pinned)
    for text in ("", "00", PUBLIC.upper() + "g"):
        (tmp_path / "helper.pub").write_text(text)
        with pytest.raises(InputError, match="is not a helper's public key"):
            read_helper_key(tmp_path / "helper.pub")
    with pytest.raises(InputError, match="cannot be read"):
        read_helper_key(tmp_path / "none")


def test_a_site_with_a_minimum_takes_part_in_larger_sums_alone() -> None:
    assert read_secure_request(FACTS, PUBLIC, 5).terms.minimum == 5
    with pytest.raises(
        InputError, match="may be of 5 clients, and this site takes part in sums of 6 or more"
    ):
        secure_encode(UPLOAD, {}, TASK, FACTS, SEED, None, None, PUBLIC, 6)
    with pytest.raises(InputError, match="secure aggregation only"):
        read_secure_request(None, None, 2)


def test_a_site_takes_part_in_sums_of_five_or_more_unless_told_otherwise() -> None:
    with pytest.raises(InputError, match="may be of 4 clients, and this site takes part in sums of 5"):
        read_secure_request(FACTS | {"minimum": 4}, PUBLIC, None)
    assert read_secure_request(FACTS | {"minimum": 4}, PUBLIC, 4).terms.minimum == 4


def test_a_helpers_key_that_only_the_server_vouches_for_is_refused() -> None:
    for read in (
        read_secure_request,
        lambda *given: secure_encode(UPLOAD, {}, TASK, FACTS, SEED, None, *given),
    ):
        with pytest.raises(InputError, match=r"whose key this site was not given.*join with --helper-key"):
            read(*((FACTS, None) if read is read_secure_request else (None, None)))


def test_a_report_opens_as_the_answer_to_one_message_and_the_server_knows_which() -> None:
    message, other = b"\1" * 32, b"\2" * 32
    share, sealed, signature = secure_encode(UPLOAD, {}, TASK, FACTS, SEED, None, {}, PUBLIC, 2, message)
    terms, seed = read_secure_request(FACTS).terms, sealed.numpy().tobytes()
    assert answered_message(seed) == message
    unseal(seed, TASK, terms, KEY)
    with pytest.raises(BindingError, match="does not open"):
        unseal(seed[:-32] + other, TASK, terms, KEY)
    intake = secure_validator(SecureEncoding(FACTS, lambda *given: None))
    intake.examine(TASK, [share, sealed, signature], message)
    with pytest.raises(Rejected, match="answers another message"):
        intake.examine(TASK, [share, sealed, signature], other)


def test_a_message_is_known_by_its_plan_its_kind_and_its_numbers() -> None:
    task = TaskMessage(
        run="a",
        task=TASK,
        start=False,
        committed=-1,
        plan={"seed": 1},
        seconds=1.0,
        form=(("float32", (1,)),),
        secure=None,
    )
    digest = message_digest(task, b"1234")
    changes = [{"plan": {"seed": 2}}, {"start": True}, {"form": (("int32", (1,)),)}]
    others = [message_digest(structs.replace(task, **change), b"1234") for change in changes]
    assert len({digest, message_digest(task, b"1235"), *others}) == 5
    same = structs.replace(task, run="b", task=TASK._replace(client=9), committed=3, seconds=2.0)
    assert message_digest(same, b"1234") == digest


def test_a_report_opens_under_the_bounds_that_its_site_kept_to_and_no_others() -> None:
    upload = Upload(torch.tensor([3.0, 4.0]), torch.tensor([1.0]))
    bounds = {"delta": 2, "stamp": None}
    facts = FACTS | {"bounds": bounds}
    leaves = secure_encode(upload, {}, TASK, facts, SEED, None)
    server = replace(read_terms(FACTS), clipping=clipping_digest({"stamp": math.inf, "delta": 2.0}))
    opened(leaves, server)
    others = [None, {"delta": 2.0}, {"delta": 2.0, "stamp": 1.0}, {"delta": 2.5, "stamp": math.inf}]
    for other in others:
        with pytest.raises(BindingError):
            opened(leaves, replace(server, clipping=clipping_digest(other)))
    with pytest.raises(BindingError):
        opened(
            leaves, replace(server, clipping=clipping_digest({"stamp": math.inf, "delta": 2.0}, ["delta"]))
        )


def test_reports_that_are_stale_under_bounds_that_move_are_let_in_to_be_dropped() -> None:
    """They open no more, which is no fault of the site."""
    leaves = [torch.zeros(0), torch.zeros(SEALED_BYTES, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)]

    def ask(task: Task, sealed: bytes, signature: bytes) -> None:
        raise BindingError("no.", [task])

    for moving, stale in ((["delta"], True), ([], False)):
        intake = secure_validator(SecureEncoding(FACTS | {"moving": moving}, ask), 6)
        if stale:
            intake.examine(TASK, leaves, NO_MESSAGE)
        for task in [TASK._replace(version=6)] + [TASK] * (not stale):
            with pytest.raises(Rejected):
                intake.examine(task, leaves, NO_MESSAGE)


def test_a_key_that_shares_no_secret_is_not_sealed_to() -> None:
    """A point of low order gives the same secret to everybody."""
    with pytest.raises(ValueError, match=r"(?i)shared|exchange|key|encrypt"):
        secure_encode(UPLOAD, {}, TASK, FACTS | {"key": "00" * 32}, SEED, None)


# --- signatures


def test_a_signature_is_of_the_sites_key_and_of_this_report_alone(tmp_path: Path) -> None:
    keys.create_keys(tmp_path / "keys", ["localhost"], ["a"], ["localhost"], 2)
    public, sign = read_signer(tmp_path / "keys" / "sites" / "a" / "key")
    facts = FACTS | {"signed": True}
    _, sealed, signature = secure_encode(UPLOAD, {}, TASK, facts, SEED, sign)
    assert signature.shape == (SIGNATURE_BYTES,)
    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), bytes.fromhex(public))
    assert fingerprint(key) == public
    said, terms = signature.numpy().tobytes(), read_secure_request(facts).terms
    seed = sealed.numpy().tobytes()
    assert verify_signature(key, signed_statement(terms, TASK, seed), said)
    others = [
        signed_statement(terms, TASK._replace(visit=0), seed),
        signed_statement(terms, TASK, bytes(SEALED_BYTES)),
        signed_statement(read_secure_request(facts | {"minimum": 4}).terms, TASK, seed),
        signed_statement(read_secure_request(facts | {"weights": "polynomial:0.25"}).terms, TASK, seed),
    ]
    assert not any(verify_signature(key, other, said) for other in others)
    for bad in (b"", said[:-1], bytes(SIGNATURE_BYTES), b"\xff" * SIGNATURE_BYTES):
        assert not verify_signature(key, signed_statement(terms, TASK, seed), bad)
    with pytest.raises(InputError, match="this site has no key: join with --key"):
        secure_encode(UPLOAD, {}, TASK, facts, SEED, None)
    with pytest.raises(InputError, match="has 3 bytes, not 96"):
        secure_encode(UPLOAD, {}, TASK, facts, SEED, lambda message: b"abc")


def test_what_is_no_key_of_a_site_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_signer(tmp_path / "key")
    wrong = [ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())]
    texts = [key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()) for key in wrong]
    for text in (*texts, b"", b"no key"):
        (tmp_path / "key").write_bytes(text)
        with pytest.raises(InputError, match="is not an OpenSSH private key of the curve P-384"):
            read_signer(tmp_path / "key")


# --- terms in words


@given(
    st.binary(min_size=1, max_size=30),
    st.integers(1, 10**9),
    st.integers(2, 1000),
    st.sampled_from([Equal(), Polynomial(0.3), Hinge(4.0, 2.0)]),
)
def test_terms_in_words_are_the_same_terms(
    run: bytes, length: int, most: int, weights: StalenessWeights
) -> None:
    terms = SecureTerms(run, length, most, 2, 12, 3, weights, weights_text(weights))
    assert read_terms(json.loads(json.dumps(write_terms(terms)))) == terms


def test_weights_without_a_name_cannot_be_agreed_on() -> None:
    class Odd:
        def __call__(self, staleness: int) -> float:
            return 1.0

    for weights in (Odd(), lambda staleness: 1.0):
        with pytest.raises(InputError, match="weights that have a name"):
            weights_text(weights)


# --- what the server can check of it


def test_an_intake_of_shares_takes_what_a_site_sends_and_joins_it() -> None:
    seen: list[Task] = []
    intake = secure_validator(SecureEncoding(FACTS, lambda task, sealed, signature: seen.append(task)))
    uploads = []
    for client in range(3):
        task = TASK._replace(client=client)
        leaves = secure_encode(UPLOAD, {}, task, FACTS, SEED, None)
        note = encode_message(UploadMessage("run", task, specs_of(leaves), "none", 0.0, None))
        uploads.append(validate_upload(note, pack(leaves), task, "run", intake, 10_000)[1])
        assert all(map(torch.equal, uploads[-1], leaves))
        intake.examine(task, uploads[-1], NO_MESSAGE)
    assert seen == [TASK._replace(client=client) for client in range(3)]
    gathered = intake.join(uploads, len(uploads))
    assert isinstance(gathered.uploads, SecretShares)
    assert gathered.uploads.share.shape == (3, 3)
    assert gathered.uploads.sealed.shape == (3, SEALED_BYTES)
    assert gathered.uploads.signature is None
    assert gathered.statistics == {}
    signed = secure_validator(SecureEncoding(FACTS | {"signed": True}, lambda *report: None))
    assert signed.form[2] == ("uint8", (SIGNATURE_BYTES,))
    assert (
        signed.join([[*leaves[:2], torch.zeros(SIGNATURE_BYTES, dtype=torch.uint8)]], 1).uploads.signature
        is not None
    )


def test_what_no_site_can_be_blamed_for_ends_the_run() -> None:
    def refuse(task: Task, sealed: bytes, signature: bytes) -> None:
        raise RunError("the helper knows this run under other terms.")

    leaves = secure_encode(UPLOAD, {}, TASK, FACTS, SEED, None)
    with pytest.raises(RunError, match="other terms"):
        secure_validator(SecureEncoding(FACTS, refuse)).examine(TASK, leaves, NO_MESSAGE)


def test_a_report_that_the_helper_could_not_add_is_rejected_and_named() -> None:
    def refuse(task: Task, sealed: bytes, signature: bytes) -> None:
        raise BindingError("the seed given for visit 7 of client 2 does not open.", [task])

    intake = secure_validator(SecureEncoding(FACTS, refuse))
    leaves = secure_encode(UPLOAD, {}, TASK, FACTS, SEED, None)
    with pytest.raises(Rejected, match=r"the helper cannot use this report: .* does not open") as caught:
        intake.examine(TASK, leaves, NO_MESSAGE)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("number", [-1, 2**62, 2.0, True, "2", None])
def test_terms_with_a_number_out_of_range_are_refused(number: object) -> None:
    for name in ("length", "most", "minimum", "bits", "weight_bits"):
        with pytest.raises(InputError, match=f"whole number as {name}"):
            read_terms(FACTS | {name: number})

"""Transformers with adapters are modules like any other, whatever engine computes them."""

import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)
from transformers.utils import logging as voice

from offbeat import (
    Asynchronous,
    Dirichlet,
    Epochs,
    Examples,
    FedOpt,
    InputError,
    Population,
    Problem,
    Sequential,
    Vectorised,
    train,
)
from offbeat.engines.process_pool import Workers
from offbeat.nn.language import (
    PAD,
    SEPARATOR,
    Classifier,
    Lora,
    bert_tiny,
    encode,
    load_classifier,
    load_tokenizer,
    train_tokenizer,
    with_lora,
)

TINY: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TEXTS = ("the cat sat on the mat", "a dog ran", "the dog sat", "cats and dogs", "the mat")
LOSSES = partial(cross_entropy, reduction="none")


def tiny(length: int = 12, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return bert_tiny(length, 2, **TINY | more)


def rows(count: int = 40, length: int = 12) -> Examples:
    """Token ids of unlike length, some of two sentences."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 60, (count, length), generator=drawn, dtype=torch.int32)
    ids[1::2, 4] = SEPARATOR
    ids[::3, 7:] = PAD
    return Examples(ids, torch.randint(0, 2, (count,), generator=drawn))


def population(data: Examples) -> Population:
    return Population(data, Dirichlet(0.6).split(data.targets.numpy(), 5, 0), Epochs(1, size=4))


def last(engine: Any) -> Tensor:
    setting: dict[str, Any] = {"dispatch": Asynchronous(3), "buffer": 2, "rounds": 4}
    *_, shot = train(FedOpt(local_lr=0.1, server_lr=1.0), engine, **setting)
    return shot.x


def test_adapters_and_the_head_are_the_vector_and_nothing_else_is_stored() -> None:
    problem = Problem(tiny(lora=Lora()), LOSSES)
    # query and value: 16 weights in, 16 out; the head: 2 x 16 and 2
    assert problem.size == 2 * (16 + 16) + 2 * 16 + 2
    assert problem.initial()[1] == {}  # BERT's numbered places are not learnt
    engine = Sequential(problem, population(rows()))
    *_, shot = train(FedOpt(0.1, 1.0), engine, dispatch=Asynchronous(3), buffer=2, rounds=2)
    assert max(tensor.numel() for tensor in shot.checkpoint().tensors.values()) == problem.size
    assert not torch.equal(shot.x, problem.initial()[0])


def test_the_frozen_body_is_never_changed() -> None:
    module = tiny()
    problem = Problem(module, LOSSES)
    trained = problem.module(last(Vectorised(problem, population(rows()))))
    before, after = module.state_dict(), trained.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    learnt = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert moved <= learnt
    assert any("lora" in name for name in moved)
    assert any("classifier" in name for name in moved)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_every_engine_gives_the_same_run(caplog: pytest.LogCaptureFixture) -> None:
    problem, clients = Problem(tiny().double(), LOSSES), population(rows())
    expected = last(Sequential(problem, clients))
    with caplog.at_level(logging.WARNING):
        mapped = last(Vectorised(problem, clients))
    assert caplog.text == ""  # else clients would be computed one by one
    torch.testing.assert_close(mapped, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(last(Workers(problem, clients, workers=1)), expected, rtol=1e-9, atol=1e-12)


def test_a_model_of_peft_works_as_it_is_with_inputs_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Without the adapter module: what cannot be mapped is computed one by one, to the same end."""
    torch.manual_seed(0)
    settings = BertConfig(**TINY, max_position_embeddings=12, attn_implementation="eager")
    model = get_peft_model(
        BertForSequenceClassification(settings), LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=8)
    )
    ids, labels = rows()
    data = Examples({"input_ids": ids.long(), "attention_mask": (ids != PAD).long()}, labels)
    problem = Problem(model, lambda outputs, targets: LOSSES(outputs.logits, targets))
    clients = population(data)
    torch.testing.assert_close(last(Vectorised(problem, clients)), last(Sequential(problem, clients)))
    assert "one by one" in caplog.text


def models() -> list[Any]:
    torch.manual_seed(0)
    size = {"vocab_size": 60, "max_position_embeddings": 12}
    distil = DistilBertConfig(**size, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    gpt = GPT2Config(
        vocab_size=60, n_positions=12, n_embd=16, n_layer=2, n_head=2, pad_token_id=PAD, eos_token_id=1
    )
    eager = BertConfig(**TINY, max_position_embeddings=12, attn_implementation="eager")
    fused = BertConfig(**TINY, max_position_embeddings=12, attn_implementation="sdpa")
    return [
        BertForSequenceClassification(eager),
        BertForSequenceClassification(fused),
        DistilBertForSequenceClassification(distil),
        GPT2ForSequenceClassification(gpt),
    ]


@pytest.mark.parametrize("place", range(4), ids=["bert", "bert-sdpa", "distilbert", "gpt2"])
def test_scores_are_those_of_the_model_with_masks_and_kinds_of_sentences_given(place: int) -> None:
    model = models()[place].eval()
    ids = rows(8).inputs.long()
    words = {"attention_mask": (ids != PAD).long()}
    if isinstance(model, BertForSequenceClassification):
        kinds = torch.zeros_like(ids)
        kinds[1::2, 5:] = 1  # what follows the separator
        words["token_type_ids"] = torch.where(ids != PAD, kinds, 0)
    with torch.no_grad():
        expected = model(input_ids=ids, **words).logits
        found = Classifier(model, PAD, SEPARATOR)(ids.int())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("place", "wide"), [(0, True), (1, True), (2, True), (3, False)])
def test_a_mask_that_can_be_mapped_is_used_where_it_means_the_same(place: int, wide: bool) -> None:
    """In one that reads from left to right, of more than one layer, it would show what comes later."""
    model = models()[place]
    assert Classifier(model, PAD, SEPARATOR)._wide is wide
    head = next(part for name, part in model.named_modules() if name in ("classifier", "score"))
    nn.init.zeros_(head.weight)
    assert Classifier(model, PAD, SEPARATOR)._wide is False  # nothing was told
    assert model.training


def test_padding_changes_nothing() -> None:
    module = tiny(12).eval()
    ids = rows(6).inputs[:, :9]
    longer = torch.cat([ids, torch.full((6, 3), PAD, dtype=torch.int32)], 1)
    with torch.no_grad():
        torch.testing.assert_close(module(ids), module(longer))


def test_dropout_outside_of_attention_is_drawn_alike_by_all_engines() -> None:
    problem = Problem(tiny(hidden_dropout_prob=0.3).double(), LOSSES)
    clients = population(rows())
    torch.testing.assert_close(
        last(Vectorised(problem, clients)), last(Sequential(problem, clients)), rtol=1e-9, atol=1e-12
    )


def test_a_learnt_tokenizer_has_frequent_words_whole_and_spells_the_rest() -> None:
    tokenizer = train_tokenizer(TEXTS, 33)  # 4 marks, 12 symbols twice, 5 words
    words = tokenizer.convert_ids_to_tokens(encode(tokenizer, ["The dog sat, zz"], length=12)[0].tolist())
    assert words[:4] == ["[CLS]", "the", "dog", "sat"]
    assert words[4:7] == ["[UNK]", "[UNK]", "[SEP]"]  # a comma and z are nowhere in the text
    assert words[7:] == ["[PAD]"] * 5
    spelled = tokenizer.convert_ids_to_tokens(encode(tokenizer, ["ran"], length=5)[0].tolist())
    assert spelled == ["[CLS]", "r", "##a", "##n", "[SEP]"]


def test_pairs_have_a_separator_between_them_and_are_cut_to_length() -> None:
    tokenizer = train_tokenizer(TEXTS, 60)
    ids = encode(tokenizer, ["the dog"], ["the mat"], length=8)[0].tolist()
    assert ids[3] == ids[6] == SEPARATOR
    assert ids[7] == PAD
    assert encode(tokenizer, ["the dog sat on the mat"], ["the mat"], length=6).shape == (1, 6)
    assert encode(tokenizer, [], length=6).shape == (0, 6)


@pytest.mark.slow
def test_the_same_text_gives_the_same_ids_in_another_process() -> None:
    """The order in which a process goes through a set differs from process to process."""
    code = (
        "from offbeat.nn.language import train_tokenizer\n"
        f"print(sorted(train_tokenizer({TEXTS!r}, 50).get_vocab().items()))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(sorted(train_tokenizer(TEXTS, 50).get_vocab().items()))


def test_a_vocabulary_without_room_for_the_symbols_is_refused() -> None:
    with pytest.raises(InputError, match="10 tokens are too few"):
        train_tokenizer(TEXTS, 10)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder as `save_pretrained` leaves it, its model without a head for classes."""
    torch.manual_seed(3)
    settings = BertConfig(**TINY | {"vocab_size": 45}, max_position_embeddings=12)
    BertForSequenceClassification(settings).bert.save_pretrained(tmp_path)
    train_tokenizer(TEXTS, 45).save_pretrained(tmp_path)
    return tmp_path


def test_weights_and_tokenizer_of_a_folder_are_used_and_the_seed_draws_what_is_new(weights: Path) -> None:
    before = torch.get_rng_state()
    first, again, other = (load_classifier(weights, 2, Lora(2, 4), seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(first.model, PeftModel)
    torch.manual_seed(3)
    settings = BertConfig(**TINY | {"vocab_size": 45}, max_position_embeddings=12)
    saved = BertForSequenceClassification(settings).bert.embeddings.word_embeddings.weight
    assert torch.equal(first.model.base_model.model.bert.embeddings.word_embeddings.weight, saved)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert any(not torch.equal(one, three) for one, _, three in pairs)
    ids = encode(load_tokenizer(weights), TEXTS, length=12)
    assert torch.equal(ids, encode(train_tokenizer(TEXTS, 45), TEXTS, length=12))
    assert first(ids).shape == (5, 2)


def test_transformers_says_nothing_while_a_folder_is_read_and_speaks_as_before_afterwards(
    weights: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    level, bars = voice.get_verbosity(), voice.is_progress_bar_enabled()
    capfd.readouterr()
    AutoModelForSequenceClassification.from_pretrained(weights)  # so there is something to be silent of
    assert "Loading weights" in capfd.readouterr().err
    assert "classifier.weight" in caplog.text
    caplog.clear()
    tokenizer = load_tokenizer(weights)
    encode(tokenizer, TEXTS, TEXTS, length=4)
    load_classifier(weights, 2)
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""
    assert (voice.get_verbosity(), voice.is_progress_bar_enabled()) == (level, bars)
    with pytest.raises(InputError):
        load_tokenizer(weights / "absent")
    (weights / "config.json").write_text("{")
    with pytest.raises(InputError):
        load_classifier(weights, 2)
    assert (voice.get_verbosity(), voice.is_progress_bar_enabled()) == (level, bars)


def test_weights_that_lack_part_of_the_body_are_refused_and_not_drawn(weights: Path) -> None:
    held = load_file(weights / "model.safetensors")
    lost = "encoder.layer.0.attention.self.query.weight"
    rest = {name: one for name, one in held.items() if name != lost}
    assert len(rest) == len(held) - 1
    save_file(rest, weights / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"for bert\.{lost} is not among them"):
        load_classifier(weights, 2)


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(InputError, match="does not hold a tokenizer"):
        load_classifier(tmp_path, 2)
    train_tokenizer(TEXTS, 45).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="does not hold a model"):
        load_classifier(tmp_path, 2)
    bare = train_tokenizer(TEXTS, 45)
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no padding token"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="no padding token"):
        Classifier.of(models()[0], bare)


def test_adapters_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(InputError, match="rank and alpha must be at least 1"):
        Lora(rank=0)
    with pytest.raises(InputError, match="peft cannot put adapters"):
        with_lora(models()[0], Lora(layers=("nowhere",)))
    with pytest.raises(InputError, match="BERT cannot be built with these settings"):
        tiny(num_attention_heads=3)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"peft: install it with pip install 'offbeat\[language\]'"):
        tiny()


@pytest.mark.slow
def test_nothing_of_it_is_imported_with_the_program() -> None:
    code = (
        "import sys, offbeat.cli.main, offbeat.nn.language\n"
        "import experiments.studies.registry, offbeat.training.build\n"
        "print({'transformers', 'peft', 'tokenizers'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"

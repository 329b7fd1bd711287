import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from offbeat.cli.main import main
from offbeat.errors import InputError
from offbeat.nn import models

CASES = [
    ("logistic", (64,), 10),
    ("mlp", (64,), 10),
    ("mlp", (1, 8, 8), 10),
    ("cnn", (1, 28, 28), 10),
    ("cnn", (3, 32, 32), 10),
    ("charformer", (80,), 80),
]


def weights(name, shape, classes, seed):
    module = models.build(name, shape, classes, seed)
    return {key: value.detach().double() for key, value in module.named_parameters()}


def rows(name, shape, classes, *counts):
    drawn = torch.Generator().manual_seed(0)
    if name == "charformer":
        return torch.randint(0, classes, (*counts, *shape), generator=drawn).to(torch.uint8)
    return torch.randn(*counts, *shape, generator=drawn, dtype=torch.float64)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "shape", "classes"), CASES)
def test_gradients_mapped_over_clients_are_each_clients_gradient(name, shape, classes):
    module = models.build(name, shape, classes, 0).double()
    clients = [weights(name, shape, classes, seed) for seed in range(3)]
    stacked = {key: torch.stack([client[key] for client in clients]) for key in clients[0]}
    inputs, targets = rows(name, shape, classes, 3, 2), torch.arange(6).reshape(3, 2)

    def loss(parameters, x, y):
        return cross_entropy(functional_call(module, parameters, (x,)), y)

    mapped = vmap(grad(loss))(stacked, inputs, targets)
    for number, client in enumerate(clients):
        alone = grad(loss)(client, inputs[number], targets[number])
        for key in alone:
            torch.testing.assert_close(mapped[key][number], alone[key], rtol=1e-10, atol=1e-12)
            assert alone[key].abs().max() > 0


@pytest.mark.parametrize(("name", "shape", "classes"), CASES)
def test_weights_follow_the_seed_and_leave_the_global_generator_alone(name, shape, classes):
    before = torch.get_rng_state()
    first, again, other = (weights(name, shape, classes, seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_weights_do_not_depend_on_what_was_drawn_before():
    first = weights("mlp", (4,), 2, 0)
    torch.rand(1)
    again = weights("mlp", (4,), 2, 0)
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_the_cnn_has_the_size_of_its_specification():
    sizes = [5 * 5 * 1 * 16 + 16, 5 * 5 * 16 * 32 + 32, 32 * 7 * 7 * 128 + 128, 128 * 10 + 10]
    assert (
        sum(value.numel() for value in weights("cnn", (1, 28, 28), 10, 0).values()) == sum(sizes) == 215_370
    )


def test_the_charformer_tells_the_order_of_symbols():
    module = models.build("charformer", (5,), 7, 0)
    one, two = module(torch.tensor([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5]]))
    assert not torch.allclose(one, two)


def test_a_place_in_the_charformer_sees_only_what_came_before():
    blocks = models.build("charformer", (6,), 7, 0).blocks
    hidden = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    changed = hidden.clone()
    changed[:, 3] += 1
    same = (blocks(hidden) == blocks(changed)).all(dim=-1)[0]
    assert same.tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("source", "shape", "classes"),
    [
        ("digits", (64,), 10),
        ("mnist", (1, 28, 28), 10),
        ("fashion-mnist", (1, 28, 28), 10),
        ("cifar10", (3, 32, 32), 10),
        ("shakespeare", (80,), 80),
    ],
)
def test_every_source_has_a_default_model_that_takes_its_inputs(source, shape, classes):
    name = models.default_model(source)
    module = models.build(name, shape, classes, 0)
    assert module(rows(name, shape, classes, 2).to(torch.float32)).shape == (2, classes)


def test_an_unknown_model_or_a_shape_it_cannot_take_is_refused():
    with pytest.raises(InputError, match="did you mean cnn"):
        models.build("cn", (1, 28, 28), 10, 0)
    with pytest.raises(InputError, match="'cnn' cannot take inputs of shape"):
        models.build("cnn", (64,), 10, 0)
    with pytest.raises(InputError, match="'charformer' cannot take inputs of shape"):
        models.build("charformer", (1, 28, 28), 10, 0)


@pytest.mark.parametrize(
    ("name", "inputs", "sentence"),
    [
        ("bert-tiny", torch.rand(3, 64), "'bert-tiny' reads tokens, which these inputs are not"),
        ("charformer", torch.rand(3, 64), "'charformer' reads tokens, which these inputs are not"),
        ("mlp", torch.tensor([[1, 2]]), "'mlp' cannot read tokens"),
        ("logistic", torch.tensor([[1, 2]], dtype=torch.uint8), "'logistic' cannot read tokens"),
        ("charformer", torch.tensor([[1, 2]]), "up to number 2: use 'bert-tiny'"),
    ],
)
def test_pixels_are_not_looked_up_as_tokens_nor_tokens_weighed_as_pixels(name, inputs, sentence):
    with pytest.raises(InputError, match=sentence):
        models.check_inputs(name, inputs, 2)


def test_inputs_that_a_model_can_read_are_not_refused():
    models.check_inputs("bert-tiny", torch.tensor([[1, 7999]]), 2)
    models.check_inputs("charformer", torch.tensor([[0, 2]], dtype=torch.uint8), 3)
    models.check_inputs("mlp", torch.rand(3, 64), 2)


@pytest.mark.parametrize("name", ["bert-tiny", "charformer"])
def test_a_model_of_tokens_on_digits_is_one_sentence(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "fedbuff", "--data", "digits", "--model", name]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"offbeat: the model '{name}' reads tokens, which these inputs are not: use the model 'mlp'.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_resnet_with_batch_norm_has_as_many_weights_and_keeps_statistics():
    plain, normed = (models.build(name, (3, 32, 32), 10, 0) for name in ("resnet18", "resnet18-bn"))
    assert (
        sum(p.numel() for p in plain.parameters())
        == sum(p.numel() for p in normed.parameters())
        == 11_173_962
    )
    assert not list(plain.buffers())
    assert sum("running_mean" in name for name, _ in normed.named_buffers()) == 20


def test_augmentation_needs_images(capsys):
    assert main(["run", "--augment", "crop-flip", "--data", "digits", "--rounds", "1"]) == 2
    assert "needs images, which digits does not have" in capsys.readouterr().err

import torch

from offbeat.population.memory import Memories


def test_a_client_that_never_wrote_has_the_initial_memory() -> None:
    memories = Memories((torch.ones(3), torch.zeros(2)))
    memories.write([4], (torch.full((1, 3), 7.0), torch.full((1, 2), 8.0)))
    for client, values in ((4, (7.0, 8.0)), (0, (1.0, 0.0))):
        first, second = memories.read(client)
        assert torch.equal(first, torch.full((3,), values[0]))
        assert torch.equal(second, torch.full((2,), values[1]))


def test_what_was_written_does_not_change_with_the_tensor_it_came_from() -> None:
    memories = Memories(torch.zeros(2))
    rows = torch.ones(1, 2)
    memories.write([0], rows)
    rows += 5
    assert torch.equal(memories.read(0), torch.ones(2))


def test_it_is_saved_and_loaded() -> None:
    memories = Memories((torch.zeros(2), torch.zeros(1)))
    memories.write([3, 1], (torch.arange(4.0).view(2, 2), torch.tensor([[9.0], [8.0]])))
    clients, columns = memories.save()
    assert clients == [1, 3]
    other = Memories((torch.zeros(2), torch.zeros(1)))
    other.load(clients, columns)
    for client in range(4):
        for left, right in zip(memories.read(client), other.read(client), strict=True):
            assert torch.equal(left, right)


def test_clients_that_keep_nothing_cost_nothing() -> None:
    memories = Memories(())
    memories.write([0, 1], ())
    assert memories.save() == ([], [])
    assert memories.read(0) == ()

"""Adapters of low rank (Hu et al. 2021) on a frozen model."""

from dataclasses import dataclass

from torch import nn

from offbeat.errors import InputError
from offbeat.language.packages import package


@dataclass(frozen=True)
class Lora:
    """Adapters on layers by the ends of their names; by default, those of `peft`: in BERT query and value."""

    rank: int = 1
    alpha: int = 8
    layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise InputError(f"rank and alpha must be at least 1, not {self.rank} and {self.alpha}.")


def with_lora(model: nn.Module, lora: Lora = Lora()) -> nn.Module:
    """The model itself, frozen, with adapters; they and the head for the classes are what is trained."""
    peft = package("peft")
    settings = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=None if lora.layers is None else list(lora.layers),
    )
    try:
        made: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise InputError(f"peft cannot put adapters on this model: {str(error).splitlines()[0]}") from error
    return made

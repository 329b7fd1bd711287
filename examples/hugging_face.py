"""A Hugging Face data set and a small transformer: reviews of five shops, classified as good or bad.

python examples/hugging_face.py
"""

import random

import datasets
import torch
from torch import Tensor, nn

import offbeat

WORDS = ["<pad>", "good", "great", "fine", "bad", "poor", "awful", "not", "the", "tea", "was", "very"]


class Transformer(nn.Module):
    """One layer over the words of a review."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), size)
        self.place = nn.Parameter(torch.zeros(8, size))
        self.layer = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.0, batch_first=True)
        self.head = nn.Linear(size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.layer(self.embed(input_ids) + self.place, src_key_padding_mask=attention_mask == 0)
        shown = attention_mask[..., None].to(hidden)
        return self.head((hidden * shown).sum(-2) / shown.sum(-2))


def task() -> offbeat.LearningTask:
    """Each shop is a client; the columns are arguments of the module by name."""
    reviews = make_reviews().map(encode)
    columns = {"inputs": ["input_ids", "attention_mask"], "target": "label"}
    train, test = offbeat.ClientData.from_dataset(reviews, by="shop", **columns).split(test=0.2)
    return offbeat.LearningTask(module=Transformer, data=train, test=test, name="reviews")


def encode(review: dict[str, str]) -> dict[str, list[int]]:
    """Token ids, padded to eight words."""
    ids = [WORDS.index(word) for word in review["text"].split()]
    return {"input_ids": ids + [0] * (8 - len(ids)), "attention_mask": [1] * len(ids) + [0] * (8 - len(ids))}


def make_reviews(count: int = 1000) -> datasets.Dataset:
    """Reviews of five shops; `not` turns a review round."""
    rng, rows = random.Random(0), []
    for number in range(count):
        good, negated = rng.random() < 0.2 + 0.15 * (number % 5), rng.random() < 0.3
        word = rng.choice(WORDS[1:4] if good is not negated else WORDS[4:7])
        text = f"the tea was {'not ' * negated}{'very ' * (rng.random() < 0.5)}{word}"
        rows.append({"text": text, "label": int(good), "shop": f"shop {number % 5}"})
    return datasets.Dataset.from_list(rows)


if __name__ == "__main__":
    result = offbeat.run(task(), "cadence", rounds=150, local_steps=5, engine="sequential")
    last = result.records[-1]
    print(f"accuracy {last['accuracy']:.3f}, worst shop {last['accuracy_worst_tenth']:.3f}")

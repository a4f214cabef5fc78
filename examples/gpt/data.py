"""A text as sequences of characters. The last sequence of each paragraph is padded."""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

LICENSE = Path(__file__).parents[2] / "LICENSE"  # the repository has no other long text
IGNORED = -100  # the target of padding, which cross_entropy ignores


class Text:
    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise SystemExit(f"There is no file {path}; pass a UTF-8 text file to --text.")
        self.text = Path(path).read_text(encoding="utf-8")
        self.characters = sorted(set(self.text))
        if len(self.characters) < 2:
            raise SystemExit(f"{path} has no text to learn.")
        self.numbers = {character: number for number, character in enumerate(self.characters)}

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self.numbers[character] for character in text])

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())

    def cut(self, context: int) -> TensorDataset:
        """Inputs and targets (the next characters), `context` long, from every paragraph."""
        inputs, targets = [], []
        for paragraph in self.text.split("\n\n"):
            tokens = self.encode(paragraph)
            for start in range(0, len(tokens) - 1, context):
                piece = tokens[start : start + context + 1]
                filled = context + 1 - len(piece)
                inputs.append(torch.nn.functional.pad(piece[:-1], (0, filled), value=0))
                targets.append(torch.nn.functional.pad(piece[1:], (0, filled), value=IGNORED))
        return TensorDataset(torch.stack(inputs), torch.stack(targets))

"""A text as one sequence of characters."""

from pathlib import Path

import torch

LICENSE = Path(__file__).parents[2] / "LICENSE"  # the repository has no other long text


class Text:
    def __init__(self, path: str | Path, context: int) -> None:
        if not Path(path).is_file():
            raise SystemExit(f"There is no file {path}; pass a UTF-8 text file to --text.")
        self.text = Path(path).read_text(encoding="utf-8")
        if len(self.text) <= context:
            raise SystemExit(f"{path} has {len(self.text)} characters; pass a longer text, or a smaller --context.")
        self.characters = sorted(set(self.text))
        self.numbers = {character: number for number, character in enumerate(self.characters)}
        self.tokens = self.encode(self.text)

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self.numbers[character] for character in text])

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())

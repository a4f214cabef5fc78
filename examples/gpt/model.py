"""A small GPT: a decoder-only transformer over characters."""

import torch
from torch import nn
from torch.nn import functional


class GPT(nn.Module):
    def __init__(
        self, num_tokens: int, context: int, width: int, num_heads: int, num_layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.apply(start_small)
        self.head.weight = self.tokens.weight  # one matrix for reading and writing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores for the next token at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Go on with the likeliest token each time."""
        tokens = tokens.to(self.tokens.weight.device)
        for _ in range(num_tokens):
            scores = self(tokens[None, -self.context :])
            tokens = torch.cat([tokens, scores[0, -1:].argmax(-1)])
        return tokens


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        by_head = self.attend(self.norm(x)).view(rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        heard = functional.scaled_dot_product_attention(*by_head, is_causal=True)
        x = x + self.dropout(self.join(heard.transpose(1, 2).reshape(rows, length, width)))
        return x + self.think(x)


def start_small(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

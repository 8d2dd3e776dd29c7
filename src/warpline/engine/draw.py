"""From logits to the next token by the catalog's ops; `sampling` does the same in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from warpline.engine.bind import Bound
from warpline.engine.schedule import ENDED_BY, SAMPLED_BY
from warpline.engine.state import State
from warpline.kernels.catalog import find


def drawing(state: State, logits: Tensor) -> list[Bound]:
    """Choose a token for each of the first rows of `state`, one for a row of `logits`, and append it."""
    rows, eos = len(logits), state.config.eos_token_id
    token, logit = torch.empty(rows, dtype=torch.long, device=logits.device), torch.empty(rows, device=logits.device)
    numbers = {"eos": -1 if eos is None else eos}
    by, ended = ([getattr(state, name)[:rows] for name in names] for names in (SAMPLED_BY, ENDED_BY))
    return [
        Bound(find("sample"), [logits, *by], [token, logit], numbers),
        Bound(find("append_token"), [token, logit, *ended], [], numbers),
    ]

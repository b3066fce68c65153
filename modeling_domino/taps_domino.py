"""Taps: the target's hidden states that the drafter reads, captured while the target runs.

`target_layer_ids` names OUTPUTS of decoder layers. From transformers 5.23 the model itself returns just the hidden
states asked for by index (`hidden_states[i + 1]` is the output of layer i); from 5.17 to 5.22 the same argument meant
layers, and before it meant "all", so there forward hooks read the layers. The last layer is always read by a hook:
`hidden_states[-1]` is taken after the final norm, while drafters are trained on the tensor before it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import transformers


SELECTS_BY_INDEX = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)


class TargetTaps:
    """Captures the tapped layers of target forwards between `__enter__` and `__exit__`.

    Args:
        layers (`nn.ModuleList`): the target's decoder layers.
        layer_ids (`list[int]`): the tapped ones, in the drafter's order.
        all_hidden_states (`bool`): the user wants every hidden state returned, so all are asked for.
        use_hooks (`bool`, *optional*): forces hooks (or native selection); by default decided by the release.

    The hooks read one forward after `__enter__` and after each `listen()`, in the thread that called it, so two runs on one
    target do not read each other's states: not from two threads, not in turns, and not from within a streamer or a criterion.
    """

    def __init__(
        self, layers, layer_ids: list[int], *, all_hidden_states: bool = False, use_hooks: bool | None = None
    ):
        self._layers = layers
        self._layer_ids = list(layer_ids)
        native = SELECTS_BY_INDEX if use_hooks is None else not use_hooks
        last = len(layers) - 1
        self._native_ids = [i for i in self._layer_ids if native and i != last]
        self._hooked_ids = [i for i in self._layer_ids if not native or i == last]
        self._all_hidden_states = all_hidden_states
        self._captured: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []
        self._listener: int | None = None

    @property
    def forward_kwargs(self) -> dict[str, Any]:
        """What to add to the target's forward arguments."""
        if self._all_hidden_states:
            return {"output_hidden_states": True}
        return {"output_hidden_states": [i + 1 for i in self._native_ids]} if self._native_ids else {}

    def __enter__(self) -> TargetTaps:
        for layer_id in self._hooked_ids:
            self._handles.append(self._layers[layer_id].register_forward_hook(self._hook(layer_id)))
        self.listen()
        return self

    def listen(self) -> None:
        """Makes the next forward of this thread the one that is read."""
        self._listener = threading.get_ident()

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hooks and lets go of the captured tensors; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._captured.clear()

    def read(self, outputs: Any, rows: int | torch.Tensor | None = None, *, device: torch.device) -> torch.Tensor:
        """The taps of the last forward, side by side: `[B, m, L * D]` on `device`.

        Args:
            outputs: what the target's forward returned.
            rows (`int` or indices `[m]`, *optional*): the first so many rows, or just these; all of them by default.
        """
        if self._native_ids and outputs.hidden_states is None:
            raise RuntimeError(
                "The target was asked for hidden states and returned none, as a target does that was unpickled in a "
                "fresh process; load it there with `from_pretrained`."
            )
        taps = []
        for layer_id in self._layer_ids:
            native = layer_id in self._native_ids
            states = outputs.hidden_states[layer_id + 1] if native else self._captured[layer_id]
            chosen = states.index_select(1, rows.to(states.device)) if torch.is_tensor(rows) else states[:, :rows]
            taps.append(chosen.to(device))
        return torch.cat(taps, dim=-1)

    def _hook(self, layer_id: int):
        last = max(self._hooked_ids)

        def capture(module, args, output):
            if threading.get_ident() == self._listener:
                self._captured[layer_id] = output[0] if isinstance(output, tuple) else output
                if layer_id == last:
                    self._listener = None

        return capture

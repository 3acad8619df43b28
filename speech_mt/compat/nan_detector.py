"""fairseq's search for the module where a NaN or Inf arose."""

from __future__ import annotations

from torch import nn


def detector_uses_legacy_hooks() -> bool:
    from fairseq.nan_detector import NanDetector

    return NanDetector.add_hooks.__module__ == NanDetector.__module__


def watch_leaves_with_full_hooks() -> None:
    """Hooks torch still supports, on the modules that compute: an encoder's dict of lists is no output for them."""
    from fairseq.nan_detector import NanDetector

    def add_hooks(self: NanDetector, module: nn.Module) -> None:
        if self.forward:
            self.fhooks.append(module.register_forward_hook(self.fhook_fn))
        if self.backward and not any(True for _ in module.children()):
            self.bhooks.append(module.register_full_backward_hook(self.bhook_fn))

    NanDetector.add_hooks = add_hooks

"""How SiT learns: flow matching on times and noise that come with each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polymix.tasks import learner

SHOWN = 10  # images drawn at every measurement and at HALVINGS of the steps, to show how training went
HALVINGS = 5


class Learner(learner.Learner):
    """A model (images, times, classes) -> prediction."""

    unit = "images"
    measures_plain = ("fid", "fd", "fd_none", "accuracy")

    def loss(self, batch: Any) -> Tensor:
        images, labels, times, noise = batch
        labels = labels if self.recipe.conditional else None
        return self.recipe.flow().loss(self.model, images, labels, times=times, noise=noise)

    def infer(self, batch: Any) -> Tensor:
        """Drawing images, from noise to the end."""
        labels = batch[1].tolist() if self.recipe.conditional else None
        return self.recipe.make_sampler().sample(
            self.model, self.data.shape[1:], seeds=range(len(batch[0])), labels=labels, flow=self.recipe.flow(),
            batch_size=len(batch[0]), device=batch[0].device,
        )  # fmt: skip

    def shown_at(self, step: int) -> bool:
        return step in {self.recipe.steps >> halving for halving in range(1, 1 + HALVINGS)}

    def before_measuring(self, model: Any) -> None:
        labels = [place % len(self.data.classes) for place in range(SHOWN)] if self.recipe.conditional else None
        self.data.history[self.global_step + 1] = self.recipe.make_sampler().sample(
            model, self.data.shape[1:], seeds=range(SHOWN), labels=labels, flow=self.recipe.flow(),
            batch_size=SHOWN, device=self.device,
        ).cpu()  # fmt: skip

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["history"] = self.data.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.data.history.update(checkpoint.get("history", {}))

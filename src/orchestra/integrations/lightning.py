"""Lightning's Trainer on any distribution strategy of Orchestra's.

    from orchestra.integrations.lightning import OrchestraStrategy

    trainer = lightning.Trainer(strategy=OrchestraStrategy("AllReduce('ring')"))

docs/integrations-lightning.md says what happens to what a fit does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from orchestra.engines.processes.distribute import distribute, end_loops
from orchestra.errors import InputError
from orchestra.strategies.base import Strategy
from orchestra.trainer.own_batches import Batches

try:
    import lightning.pytorch as lightning
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn
    from lightning.pytorch.trainer.states import TrainerFn

    from orchestra.integrations.lightning_workers import AmongWorkers
except ImportError as error:
    raise InputError(
        f"orchestra.integrations.lightning needs Lightning ({error}): "
        "pip install 'neural-orchestra[lightning]'"
    ) from None

STATE = "orchestra"
"""The place of Orchestra's state in a checkpoint of Lightning's."""


class OrchestraStrategy(AmongWorkers):
    """Trains with `orchestra.distribute`; pass it to `lightning.Trainer(strategy=...)`.

    The processes are those that torchrun or another launcher has started; without one there is
    one worker. Orchestra deals out the training data, and Lightning's samplers those of an
    evaluation. Every worker gets equally many training batches.

    Args:
        strategy: an object such as `AllReduce("ring")`, or its notation as text.
        seed: of the order of the samples; by default that of `lightning.seed_everything`, or 0.
        bucket_megabytes: as in `orchestra.distribute`, like all that follow.
        overlap: exchange gradients while the backward pass goes on.
        patience: seconds without an exchange or a training step until a worker counts as hung. An
            evaluation, saving, and what is done between epochs may take longer.
        host: the local address that the other ranks are to use.

    Raises:
        InputError: `strategy` is none. From `fit`: what was asked for cannot be done.
    """

    def __init__(
        self,
        strategy: Strategy[Any] | str,
        *,
        seed: int | None = None,
        bucket_megabytes: float = 25.0,
        overlap: bool = True,
        patience: float = 60.0,
        host: str | None = None,
    ) -> None:
        super().__init__(strategy, {"patience": patience, "host": host})
        self._seed = seed
        self._options: dict[str, Any] = {"bucket_megabytes": bucket_megabytes, "overlap": overlap}
        self._epoch: Generator[Any, None, None] | None = None  # training batches of the one begun
        self._evaluating: tuple[int, ...] = ()  # the workers that the data are dealt out to
        self._state: dict[str, Any] | None = None  # of a checkpoint that is being made
        self._to_load: dict[str, Any] | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning deals out the data of a loader that it asks for now: those of
        training, which is the only one before `distribute`, are Orchestra's to deal out."""
        return self._batches is not None or not self._trainer.training

    @property
    def _trainer(self) -> lightning.Trainer:
        return self._module.trainer

    @property
    def _module(self) -> lightning.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _distributed(self) -> Batches:
        assert self._batches is not None
        return self._batches

    # Set-up

    def setup_environment(self) -> None:
        """Come together with the other ranks; an earlier fit ends here."""
        super().setup_environment()
        if self._trainer.state.fn == TrainerFn.FITTING:
            end_loops()
            self._batches = self._epoch = self._to_load = None
        self._reporter.phase("paused")

    def setup(self, trainer: lightning.Trainer) -> None:
        """Refuse what would be trained wrongly."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not self._module.automatic_optimization or len(self.optimizers) != 1:
            raise InputError(
                "OrchestraStrategy trains with automatic optimization and one optimizer: give all "
                "parameters to one, or write the loop with orchestra.distribute"
            )
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            raise InputError(
                "Trainer(reload_dataloaders_every_n_epochs=...): the training data are dealt out "
                "once, so that they cannot be loaded anew: let the data set change itself"
            )
        if self._layer_sync is not None:
            raise InputError(
                "Trainer(sync_batchnorm=True) needs a process group of torch.distributed: use "
                "GroupNorm, or plain BatchNorm"
            )

    def process_dataloader(self, dataloader: object) -> object:
        """Distribute model and optimizer when the training data are there.

        A dedicated server serves in here; its script ends with those of the workers.
        """
        if not self._trainer.training:
            return dataloader
        if self._batches is not None:
            raise InputError(
                "OrchestraStrategy deals out one training loader: combine the data sets into one"
            )
        assert self.model is not None
        loader: Any = dataloader
        _auto_add_worker_init_fn(loader, self.global_rank)
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed
        _, _, self._batches = distribute(
            self.model, self.optimizers[0], loader, self._orchestra,
            seed=seed, work="equal", **self._options, **self._place,
        )  # fmt: skip
        if self._batches.ended:  # a server, whose workers have come to another fit
            return []
        if self._to_load is not None:
            self._batches.load_state_dict(self._to_load)
        self._to_load = None
        self._evaluating = self._workers
        return _TrainingData(loader, self)

    # A step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Through the module's `__call__`, which Orchestra has its hooks in."""
        module = self._module
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside are the backward passes that accumulate, but for the last one."""
        with self._distributed.accumulate():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._orchestra.reads_loss and self._batches is not None:
            self._batches.report(closure_loss.item() * self._trainer.accumulate_grad_batches)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: lightning.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """After the last one of an epoch every worker's model holds the agreed parameters."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._trainer.is_last_batch:
            self._settle()
        if self._evaluating != self._workers:
            self._follow_switch()
        return output

    def _follow_switch(self) -> None:
        """Some workers have become servers: the others evaluate, and these serve to the end."""
        self._evaluating = self._workers
        self._trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
        if self._serves:
            if self._epoch is not None:
                self._epoch.close()
                self._epoch = None
            self._distributed.serve_to_the_end()
            self._trainer.should_stop = True  # the workers have come to another fit

    def begin_epoch(self) -> Generator[Any, None, None]:
        """The training batches of this worker."""
        if self._epoch is not None:  # Lightning has skipped the rest
            self._settle(over=True)
        self._epoch = iter(self._distributed)
        return self._epoch

    def _settle(self, *, over: bool = False) -> None:
        """Let the models agree; at the end of Lightning's epoch Orchestra's ends, too."""
        if self._epoch is None:
            return
        if not over and not self._trainer.is_last_batch:
            self._distributed.agree()
            return
        self._epoch.close()
        self._distributed.end_epoch()
        self._epoch = None
        self._reporter.phase("paused")

    def on_train_end(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._settle()
        self._epoch = None
        self._reporter.phase("paused")

    # Evaluation

    def on_validation_start(self) -> None:
        """What is evaluated is the agreed model, in mid-epoch, too."""
        self._settle()
        self._reporter.phase("paused")

    def on_validation_end(self) -> None:
        if self._epoch is not None:
            self._reporter.phase("training")

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of the agreed model; in mid-epoch the workers agree here."""
        self._settle()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On the first worker, with the moments that lie in parts on other ranks."""
        if self._batches is None or self._batches.ended:
            return super().optimizer_state(optimizer)
        self._state = self._batches.state_dict()
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """With Orchestra's state, unless only weights are saved."""
        if self._state is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE] = self._state
        self._state = None
        self._reporter.phase("paused")
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.on_validation_end()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._to_load = checkpoint.pop(STATE, None)
        return checkpoint


class _TrainingData:
    """The training batches of this worker, as Lightning iterates them."""

    def __init__(self, loader: Any, strategy: OrchestraStrategy) -> None:
        # Lightning tells these the number of the epoch.
        self.sampler = getattr(loader, "sampler", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)
        self._strategy = strategy

    def __len__(self) -> int:
        return len(self._strategy._distributed)

    def __iter__(self) -> Iterator[Any]:
        yield from self._strategy.begin_epoch()

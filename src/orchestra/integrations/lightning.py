"""Lightning's Trainer with any distribution strategy of Orchestra.

    from orchestra.integrations.lightning import OrchestraStrategy
    trainer = lightning.Trainer(strategy=OrchestraStrategy("AllReduce('ring')"))

docs/how-to/lightning.md describes how each feature of a fit behaves.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orchestra.engines.processes.distribute import distribute, end_loops, runtime_beside_loops
from orchestra.engines.processes.environment import detect, rank, world_size
from orchestra.errors import InputError
from orchestra.strategies.base import Strategy, roles_of
from orchestra.strategies.registry import strategy_of_script
from orchestra.trainer.own_loop import Batches
from orchestra.worker.runtime import RankActivity

try:
    import lightning.pytorch as lightning
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn
    from lightning.pytorch import callbacks
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning_utilities.core.rank_zero import rank_zero_only

    from orchestra.integrations.worker_group import WorkerGroup, connect, disconnect
except ImportError as error:
    raise InputError(
        f"orchestra.integrations.lightning needs Lightning ({error}): "
        "pip install '.[lightning]' in a clone of Orchestra"
    ) from None

STATE = "orchestra"
"""The key of Orchestra's state in a Lightning checkpoint."""


class OrchestraStrategy(ParallelStrategy):
    """Trains with `orchestra.distribute`; pass it to `lightning.Trainer(strategy=...)`.

    The processes are those that torchrun or another launcher started; without a launcher there
    is one worker. Orchestra distributes the training data, Lightning's samplers those of an
    evaluation. All workers get the same number of training batches.

    Args:
        strategy: an object such as `AllReduce("ring")`, or its notation as text.
        seed: of the order of the samples; by default that of `lightning.seed_everything`, or 0.
        bucket_megabytes: as in `orchestra.distribute`, like all that follow.
        patience: seconds without an exchange or a training step after which a worker counts as
            hung. Evaluating, saving, and work between epochs may take longer.
        host: the local address that the other ranks are to use.

    Raises:
        InputError: `strategy` is not a strategy. From `fit`: a feature that is not supported.
    """

    def __init__(
        self,
        strategy: Strategy | str,
        *,
        seed: int | None = None,
        bucket_megabytes: float = 25.0,
        overlap: bool = True,
        patience: float = 60.0,
        host: str | None = None,
    ) -> None:
        super().__init__()
        self._orchestra = strategy_of_script(strategy)
        self._seed = seed
        self._options: dict[str, Any] = {"bucket_megabytes": bucket_megabytes, "overlap": overlap}
        self._place: dict[str, Any] = {"patience": patience, "host": host}
        self._launched = detect(os.environ)
        # Lightning asks for the number of workers before anything is distributed
        self._first_workers = roles_of(self._orchestra, world_size()).workers
        self._group: WorkerGroup | None = None
        self._batches: Batches | None = None  # once the model is distributed
        self._epoch: Generator[Any, None, None] | None = None  # training batches of the one begun
        self._evaluating: tuple[int, ...] = ()  # the workers that the data are dealt out to
        self._state: dict[str, Any] | None = None  # of a checkpoint that is being made
        self._to_load: dict[str, Any] | None = None

    # Who and where this process is

    @property
    def global_rank(self) -> int:
        return rank()

    @property
    def local_rank(self) -> int:
        return 0 if self._launched is None else self._launched.local_rank

    @property
    def world_size(self) -> int:
        """The number of workers; ranks that only serve do not count."""
        # To a server its script is one of a single process
        return len(self._workers) if self.global_rank in self._workers else 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        # With fewer devices than local ranks some share one, as CPU ranks do
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Evaluations are dealt out to the workers of now, of which a switch may leave fewer
        ranks = (self.global_rank,) if self._group is None else self._group.ranks
        return {"num_replicas": len(ranks), "rank": ranks.index(self.global_rank)}

    @property
    def _workers(self) -> tuple[int, ...]:
        return self._first_workers if self._batches is None else self._batches.workers

    @property
    def is_distributed(self) -> bool:
        """True if Lightning distributes the data of the loader that it asks for now. Training
        data, the only ones before `distribute`, are distributed by Orchestra.
        """
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

    def set_world_ranks(self) -> None:
        """Make Lightning log and save on the first rank only."""
        # Set by hand, since Lightning's own launchers, which would do so, are not used
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Connect to the other ranks; an earlier fit ends here."""
        super().setup_environment()
        # Lightning would take all GPUs that it finds, and train on the first
        devices = len(self.parallel_devices or ())
        if self._launched is None and devices > 1:
            raise InputError(
                f"{devices} devices, but OrchestraStrategy starts no processes: run the script "
                f"by torchrun --nproc-per-node {devices}, or set Trainer(devices=1)"
            )
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._refuse_callbacks()
        # Connections of its own: metrics and decisions must not be mistaken for gradients.
        runtime = runtime_beside_loops(**self._place)
        self._reporter = runtime.reporter
        self._group = WorkerGroup(runtime.transport, lambda: self._workers)
        # An evaluation after a fit needs that fit's workers
        if self._trainer.state.fn == TrainerFn.FITTING:
            end_loops()
            self._batches = self._epoch = self._to_load = None
        self._reporter.activity(RankActivity.PAUSED)

    def _refuse_callbacks(self) -> None:
        """Refuse callbacks of Lightning's that would train something else without a word."""
        refused: dict[type[lightning.Callback], str] = {
            callbacks.LearningRateFinder: "a search trains, and then starts again: search in one "
            "process without OrchestraStrategy",
            callbacks.BatchSizeFinder: "a search trains, and then starts again: search in one "
            "process without OrchestraStrategy",
            callbacks.BaseFinetuning: "the optimizer has to hold all parameters from the start: "
            "give it those that are frozen in a group with a learning rate of 0, and raise that "
            "by a scheduler",
        }
        if not self._orchestra.traits().lockstep:
            refused[callbacks.WeightAveraging] = (
                f"under {self._orchestra!r} workers' models differ between exchanges, and so "
                "would their averages: take AllReduce or a synchronous server"
            )
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            for kind, reason in refused.items():
                if isinstance(callback, kind):
                    raise InputError(f"{type(callback).__name__}: {reason}")

    def setup(self, trainer: lightning.Trainer) -> None:
        """Connect the metrics across the workers, and refuse what would be trained wrongly."""
        super().setup(trainer)
        if self.model is not None and self._group is not None:
            connect(self.model, self._group)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        # `backward()` and `step()` are taken over for one optimizer
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

    def teardown(self) -> None:
        """Return to a single process, and disconnect the metrics."""
        if self.model is not None and self._group is not None:
            disconnect(self.model, self._group)
        launched = dict(os.environ)
        super().teardown()
        # Lightning deletes WORLD_SIZE, which says who takes part in what follows
        os.environ.update(launched)

    def process_dataloader(self, dataloader: Any) -> object:
        """Distribute model and optimizer, once the training data are there.

        A dedicated server serves in here; its script ends with those of the workers.
        """
        if not self._trainer.training:
            return dataloader
        if self._batches is not None:
            raise InputError(
                "OrchestraStrategy deals out one training loader: combine the data sets into one"
            )
        assert self.model is not None
        # Lightning does it for loaders that it deals out itself
        _auto_add_worker_init_fn(dataloader, self.global_rank)
        # Where seed_everything leaves it
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed
        _, _, self._batches = distribute(
            self.model, self.optimizers[0], dataloader, self._orchestra,
            # Equal numbers of batches: Lightning counts them in advance, and ends its epoch by that
            seed=seed, work="equal", **self._options, **self._place,
        )  # fmt: skip
        self._batches.serve_to_the_end()
        if self._batches.ended:  # a server, whose workers have come to another fit
            return []
        # Loading a checkpoint comes before the data, without which there is no loop to load it into
        if self._to_load is not None:
            self._batches.load_state_dict(self._to_load)
        self._to_load = None
        self._evaluating = self._workers
        return _TrainingData(dataloader, self)

    # A step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module through its `__call__`, to which Orchestra's hooks are attached."""
        module = self._module
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    def block_backward_sync(self) -> Any:
        """Enclose those backward passes that only accumulate: all but the last one of a step."""
        return self._distributed.accumulate()

    def pre_backward(self, closure_loss: Tensor) -> None:
        # item() waits for the device, so only rules that watch the loss have it. Lightning has
        # divided the loss by the number of batches of a step.
        if self._orchestra.traits().reads_loss and self._batches is not None:
            self._batches.report(closure_loss.item() * self._trainer.accumulate_grad_batches)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step. After an epoch's last one every worker has the agreed parameters."""
        output = super().optimizer_step(*args, **kwargs)
        # Before Lightning evaluates or saves at the end of the epoch
        if self._trainer.is_last_batch:
            self._settle()
        if self._evaluating != self._workers:
            self._follow_switch()
        return output

    def _follow_switch(self) -> None:
        """Follow a switch of roles: new servers serve to the end, the other workers evaluate."""
        self._evaluating = self._workers
        # Made anew at the next evaluation, by the samplers of the workers of now
        self._trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
        if self.global_rank not in self._workers:
            self._leave_epoch()
            self._distributed.serve_to_the_end()
            self._trainer.should_stop = True  # the workers have come to another fit

    def begin_epoch(self) -> Generator[Any, None, None]:
        """Return the training batches of this worker."""
        self._settle(over=True)  # if Lightning has skipped the rest of the one before
        self._epoch = iter(self._distributed)
        return self._epoch

    def _settle(self, *, over: bool = False) -> None:
        """Make the models agree; at the end of Lightning's epoch, end Orchestra's, too."""
        if self._epoch is None:
            return
        # In mid-epoch, for an evaluation or a checkpoint
        if not over and not self._trainer.is_last_batch:
            self._distributed.agree()
            return
        self._leave_epoch()
        self._distributed.end_epoch()
        self._reporter.activity(RankActivity.PAUSED)

    def _leave_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None

    def on_train_end(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._settle()
        self._epoch = None
        self._reporter.activity(RankActivity.PAUSED)

    # Evaluation

    def on_validation_start(self) -> None:
        """Agree on the model that is to be evaluated, in mid-epoch, too."""
        self._settle()
        self._reporter.activity(RankActivity.PAUSED)

    def on_validation_end(self) -> None:
        if self._epoch is not None:
            # In training a rank that takes no step counts as hung; elsewhere it may take its time
            self._reporter.activity(RankActivity.TRAINING)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the agreed model. In mid-epoch the workers agree here."""
        self._settle()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state on the first worker, with all moments; empty on others."""
        if self._batches is None or self._batches.ended:
            return super().optimizer_state(optimizer)
        # On all workers: moments are collected from those that have them
        self._state = self._batches.state_dict()
        # Others save nothing, and theirs would lack the moments
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the checkpoint, with Orchestra's state unless it has weights only."""
        # Lightning leaves these out with save_weights_only
        if self._state is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE] = self._state
        self._state = None
        self._reporter.activity(RankActivity.PAUSED)
        super().save_checkpoint(checkpoint, *args, **kwargs)
        # Back to training, if an epoch is under way
        self.on_validation_end()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        # Kept until there is a loop, see process_dataloader
        self._to_load = checkpoint.pop(STATE, None)
        return checkpoint

    # Between processes

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean"
    ) -> Tensor | Any:
        """Return the reduced tensor, the same on all workers; other values as they are."""
        _check_group(group)
        if not isinstance(tensor, Tensor) or self._group is None:
            return tensor
        # torch.distributed's operations are enumerations with such names
        return self._group.reduce(tensor, getattr(reduce_op, "name", reduce_op) or "mean")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(self.reduce(torch.tensor(decision), reduce_op="min" if all else "max"))

    def barrier(self, name: str | None = None) -> None:
        if self._group is not None:
            self._group.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of rank `src`: JSON data, because nothing that arrives is unpickled."""
        return obj if self._group is None else self._group.broadcast(obj, src)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Return the tensors of all workers, which have one shape, stacked."""
        _check_group(group)
        if sync_grads:
            raise InputError("all_gather(sync_grads=True): gradients do not flow to other workers")
        if self._group is None or not self._group.is_several():
            return tensor
        return torch.stack(self._group.gather(tensor))


def _check_group(group: Any | None) -> None:
    if group is not None:
        raise InputError("OrchestraStrategy has no process groups: leave out group=")


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

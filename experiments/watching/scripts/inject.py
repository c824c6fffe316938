"""Run a training script of torch with a fault from one of its steps on: FAULT STEP PREFIX SCRIPT ARGUMENTS.

PREFIX selects parameters by the beginnings of their names. The script is not changed: hooks of torch are used.
"""

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class State:
    """The model of the script, and its steps so far."""

    def __init__(self, fault: str, start: int, prefix: str) -> None:
        self.fault, self.start, self.prefix = fault, start, prefix
        self.model: nn.Module | None = None
        self.step, self.first = 0, -1
        self.kept: dict[str, Tensor] = {}
        self.initial: dict[str, Tensor] = {}

    def chosen(self) -> dict[str, nn.Parameter]:
        assert self.model is not None
        named = {name.removeprefix("module."): param for name, param in self.model.named_parameters()}
        return {name: param for name, param in named.items() if name.startswith(self.prefix)}

    def forward(self, module: nn.Module, _: object) -> None:
        if self.model is None and torch.is_grad_enabled() and any(True for _ in module.parameters()):
            self.model = module
            if not self.chosen():  # a teacher, for instance
                self.model = None
                return
            self.initial = {name: param.detach().clone() for name, param in self.chosen().items()}
            for name, param in self.chosen().items():
                param.register_hook(lambda grad, name=name: self.gradient(name, grad))

    def output(self, module: nn.Module, _: object, output: object) -> object:
        if self.fault == "infinite_output" and self.step == self.start and module is self.module():
            return output * float("inf")  # type: ignore[operator]
        return None

    def module(self) -> nn.Module:
        assert self.model is not None
        name = next(iter(self.chosen())).rpartition(".")[0]
        root = self.model.module if hasattr(self.model, "module") else self.model
        return root.get_submodule(name)  # type: ignore[union-attr, operator]

    def gradient(self, name: str, grad: Tensor) -> Tensor | None:
        at, on = self.step == self.start, self.step >= self.start
        if self.fault == "nan_gradient" and at and name == next(iter(self.chosen())):
            grad = grad.clone()
            grad.view(-1)[0] = float("nan")
            return grad
        factors = {"dead": 0.0, "vanishing": 1e-6, "exploding": 1e5, "ascent": -1.0}
        return grad * factors[self.fault] if self.fault in factors and on else None

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.first < 0:
            self.first = id(optimizer)
        with torch.no_grad():
            self.after_update(optimizer)
        if id(optimizer) == self.first:
            self.step += 1

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        at, on, chosen = self.step == self.start, self.step >= self.start, self.chosen()
        name, param = next(iter(chosen.items()))
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.fault == "rate" and at:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 1000
                group["initial_lr"] = group.get("initial_lr", group["lr"]) * 1000
        if self.fault == "bit_flip" and at:
            param.view(-1)[0] *= 2.0**40
        if self.fault == "initial_values" and at:
            for name, param in chosen.items():
                param.copy_(self.initial[name])
        if self.fault == "ranks_drift" and on and rank == 1:
            param.mul_(1.001)
        if self.fault == "rank_lost_step" and at and rank == 1:
            for name, param in chosen.items():
                param.copy_(self.kept[name])
        if self.fault == "not_updated" and on:
            for name, param in chosen.items():
                param.copy_(self.kept[name])
        self.kept = {name: param.detach().clone() for name, param in chosen.items()}


def main() -> None:
    fault, start, prefix, script, *arguments = sys.argv[1:]
    state = State(fault, int(start), prefix)
    nn.modules.module.register_module_forward_pre_hook(state.forward)
    nn.modules.module.register_module_forward_hook(state.output)  # type: ignore[arg-type]
    register_optimizer_step_post_hook(state.stepped)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

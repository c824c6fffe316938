"""The step machine: the one statement of when parameters are unsharded, resharded and reduced.

A backend sends **signals** (the forward of a unit begins, a gradient of its output arrives, ...) and executes the **actions**
that come back. The machine holds the state; it knows no tensors, no collectives and no framework. Autograd decides the order of
signals (checkpointing, frozen units and branches that are not taken change it), so no fixed list of actions would do.

- `UnitStep` is one unit: its state, its `StepSettings`, and the actions of each signal that concerns it alone.
- `ModelStep` is all units under one root. `Prefetching` and `ReductionOrder` decide the order of its actions.

torch's hooks run this machine, `crossframe.plan` folds it over a list of signals, and the numpy reference runs the same
`UnitStep`.
"""

from crossframe.step.root_step import ModelStep
from crossframe.step.settings import StepSettings
from crossframe.step.unit import Action, StepCount, UnitStep

__all__ = ["Action", "ModelStep", "StepCount", "StepSettings", "UnitStep"]

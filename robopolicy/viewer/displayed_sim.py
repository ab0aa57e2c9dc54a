"""Simulator whose first environment is shown by a display while policies run in it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from robopolicy.sim.contract import Step, VectorSim
from robopolicy.viewer.display import Display
from robopolicy.viewer.frames import EpisodeFrame
from robopolicy.viewer.recording_sim import RecordingSim


class DisplayedSim(RecordingSim):
    """Wrapper of `sim` for a policy, whose name `label`, if any, precedes the seeds of the episodes.

    A frame is passed on when the next step begins, since the chunk of its step is known then.
    """

    def __init__(self, sim: VectorSim, display: Display, label: str = "") -> None:
        super().__init__(sim, self._keep)
        self._display, self._label = display, label
        self._frame: EpisodeFrame | None = None  # newest frame
        self._place: tuple[int, int] = (0, 0)  # its seed and step
        self._chunk: Tensor | None = None  # (H, A) of the newest frame and the following ones

    def predict(self, chunks: Tensor, rows: Tensor) -> None:
        """Note chunks `(R, H, A)` of the environments `rows` `(R,)` before their first action."""
        for index in (rows == 0).nonzero().flatten().tolist():
            self._chunk = chunks[index].float().cpu().clone()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the simulator and show the frame before the step."""
        if active is None or bool(active[0]):
            self.flush()
        return super().step(action, active)

    def flush(self) -> None:
        """Show the newest frame, e.g. at the end."""
        if self._frame is None:
            return
        frame, self._frame = self._frame, None
        if self._chunk is not None and len(self._chunk):
            frame, self._chunk = replace(frame, chunk=self._chunk.numpy()), self._chunk[1:]
        seed, step = self._place
        label = f"{self._label}, seed {seed}" if self._label else f"seed {seed}"
        self._display.add(label, step * self.spec.control_dt, frame)

    def _keep(self, frame: EpisodeFrame, seed: int, step: int) -> None:
        if step == 0:  # of an episode whose chunk is not known yet
            self._chunk = None
            self.flush()
        self._frame, self._place = frame, (seed, step)

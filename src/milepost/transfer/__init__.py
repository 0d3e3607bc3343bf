"""Moving bytes from where they lie to where they belong: plan which ranges go where, then move them in parallel
within a fixed memory bound."""

from milepost.transfer.execute import Progress, Sink, execute
from milepost.transfer.plan import Window, plan, windows

__all__ = ["Progress", "Sink", "Window", "execute", "plan", "windows"]

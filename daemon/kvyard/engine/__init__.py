"""Model families, weights, runner, sampler, backends and the engine process; the only part with torch.

Importing it sets the threads of OpenMP where the user has not: that must come before torch, and every way
from the engine to torch leads through this package.
"""

from kvyard.engine.threads import configure

configure()

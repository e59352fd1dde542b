"""Mechanism without torch: request lifecycle, block pool, prefix cache, planner, guard, swap."""

"""Model families, weights, runner, sampler, backends and the engine process; the only part with torch."""

"""Memory plans: candidates, fit, derived settings, ranking."""

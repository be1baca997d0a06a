"""Ways to an optimal plan: formulas, exact solvers, columns of a large problem, clusters."""

"""Model folders: configuration, weights, parameter names and sampling defaults."""

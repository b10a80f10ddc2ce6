"""What the evaluation stage asks: settings, graders, and models served elsewhere."""

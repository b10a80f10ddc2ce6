"""What the evaluation stage uses: settings, sets, graders, and models served elsewhere."""

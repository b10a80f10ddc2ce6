"""What a response is worth: a scorer chosen by data source, run under a time limit, plus overlong shaping."""

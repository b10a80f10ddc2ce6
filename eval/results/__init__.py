"""Result rows of an evaluation, their summary and statistics."""

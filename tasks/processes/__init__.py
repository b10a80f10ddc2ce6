"""Child processes: supervised, watched, limited in time, and the stages among them."""

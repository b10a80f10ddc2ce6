"""Another trainer (train.backend) as the training stage: started, followed, stopped, its checkpoint converted."""

"""Another trainer (train.backend) as the training stage: launch, progress, resume, conversion of
checkpoints.
"""

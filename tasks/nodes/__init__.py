"""A cluster's machines: their inventory, Ray on them, and rendered start files."""

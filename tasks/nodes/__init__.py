"""A cluster's machines: their inventory, and Ray on them."""

"""Load jobs: bring what a training will read into the cache before it is read."""

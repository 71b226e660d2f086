"""Load jobs: fetch the files of a training into the cache before the training reads them."""

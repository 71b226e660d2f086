"""The FUSE container of a ThinRuntime of Fluid: from config.json to mounts.

`config_json` reads the file, `options` names and checks the options, `wanted` decides which mounts
there must be, `mounts` has the process of each, and `reconcile` starts and ends them.
"""

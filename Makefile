.DEFAULT_GOAL := help
.PHONY: help bootstrap demo check test test-long test-python-path test-stalls test-csi \
	test-kubernetes lint format bench bench-peers screenshots wheel deb image man test-packages lock \
	clean

WORKERS ?= 6
# Compiled tests are kept, whatever the environment says: to compile all of them takes each worker
# of pytest 10 s.
export PYTHONDONTWRITEBYTECODE :=
# These need a browser, which `scripts/bootstrap` then installs.
test test-long test-python-path screenshots: export WITH_BROWSER := 1
# How reads, writes, interrupts and notices reach the kernel, and how a mount starts and ends.
RELAY_CHANGES := bad_disk bad_input damaged_slabs dropped_names hog killed limits metrics open_files \
	outage_s3 read_ahead reading replaced storm systemd_notify users write_parts writes
PYTHONS := src tests scripts/fetch $(wildcard bench demo deploy)

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

bootstrap: ## Debian packages, .venv with locked versions, cachefs itself
	@scripts/bootstrap

demo: bootstrap ## mount a real S3 bucket and read three epochs from it
	@.venv/bin/python demo/demo.py

lint: bootstrap ## style, types and import contracts
	.venv/bin/ruff check $(PYTHONS)
	.venv/bin/ruff format --check $(PYTHONS)
	.venv/bin/mypy
	.venv/bin/lint-imports

check: lint ## style, types, contracts, and the tests that need no mount, no server and little time
	.venv/bin/pytest -q -n $(WORKERS) --dist worksteal -m "not mount and not server and not long" \
		--ignore=tests/mount --ignore=tests/crash

test: lint ## all checks and all tests; what fails runs once more, alone
	.venv/bin/python -m tests.second_look -q -n $(WORKERS) --dist loadfile --durations=10

test-long: lint ## all tests in full size (tests/sizes.py)
	CACHEFS_LONG_TESTS=1 .venv/bin/python -m tests.second_look -q -n $(WORKERS) --dist loadfile \
		--durations=30

test-python-path: bootstrap ## what the relay changes, again without it
	CACHEFS_TEST_DATA_PATH=python .venv/bin/python -m tests.second_look -q -n $(WORKERS) \
		--dist loadfile $(RELAY_CHANGES:%=tests/mount/test_%.py)

test-stalls: bootstrap ## the tests without mounts in processes that stop at random moments
	.venv/bin/pytest -q -n $(WORKERS) --dist loadfile -p tests.stalls \
		--ignore=tests/mount --ignore=tests/crash

test-csi: bootstrap ## the CSI plugin against csi-sanity of the Kubernetes project (needs Go and root)
	@scripts/csi-sanity

test-kubernetes: ## the manifests by the validation of a Kubernetes API server (needs Go)
	@scripts/validate-manifests

format: bootstrap ## let ruff rewrite the sources
	.venv/bin/ruff check --fix $(PYTHONS)
	.venv/bin/ruff format $(PYTHONS)

bench: bootstrap ## the benchmark: a table, and JSON in bench/out
	@.venv/bin/python -m bench

bench-peers: bootstrap ## beside other mounts and ext4, some 35 minutes: bench/RESULTS.md
	@command -v s3fs >/dev/null || [ "$$(id -u)" != 0 ] \
		|| apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends s3fs >/dev/null || true
	@.venv/bin/python -m bench.peers

screenshots: bootstrap ## pictures of the console for docs/CONSOLE.md
	@command -v pngquant >/dev/null || [ "$$(id -u)" != 0 ] \
		|| apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends pngquant >/dev/null || true
	@.venv/bin/python -m bench.console

wheel: ## dist/wheels: all as wheels, for nodes without a compiler or the internet (needs root)
	@deploy/packages/wheel

deb: ## dist/cachefs_VERSION_ARCH.deb, with a Python of its own (needs root)
	@deploy/packages/deb

image: ## dist/cachefs-VERSION-image.tar, an OCI image (needs root)
	@deploy/image/build

man: bootstrap ## dist/man: man pages from the texts of --help
	@.venv/bin/python deploy/packages/man.py dist/man

test-packages: bootstrap image ## all three on machines without anything (needs root), some 10 minutes
	.venv/bin/pytest -q deploy/tests

lock: ## resolve all dependencies again into requirements/*.lock
	@scripts/lock

clean: ## remove everything that was built here
	rm -rf .venv .build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info src/cachefs/control/console/static/uplot* src/cachefs/csi/spec/csi_pb2.py*

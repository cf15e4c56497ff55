# Aliquot's tasks. `make demo` and `make test` need Rust and nothing else installed by hand; the tests
# against a real Kubernetes also need Linux, root and Go, and say so when they are skipped.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
TARGET := $(or $(CARGO_TARGET_DIR),target)
PREFIX ?= /usr/local

.PHONY: help
help: ## This list.
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build ## The whole line on this machine: no GPU, no cluster, no root.
	@$(TARGET)/debug/aliquot demo $(DEMO_ARGS)

.PHONY: build
build: build-hook ## Everything that the demo and the tests run.
	@cargo build --workspace --exclude aliquot-preload --exclude aliquot-core

.PHONY: build-hook
build-hook: ## What containers get: the limiter's two files and the static OCI hook.
	@tools/build-hook

.PHONY: test
test: ## The tests that take Rust and a C compiler alone.
	@tools/test

.PHONY: test-all
test-all: ## Every test that this machine can run; with root and Go those on a real Kubernetes, too.
	@tools/test-all

.PHONY: e2e
e2e: ## The tests on a real Kubernetes only (Linux, root, Go).
	@tools/test-cluster

.PHONY: chaos
chaos: ## Thousands of pods of many tenants while controllers die and requests fail; half an hour. SEED=, PODS=.
	@ALIQUOT_CHAOS_SEED=$(or $(SEED),7) ALIQUOT_CHAOS_PODS=$(or $(PODS),5000) \
		cargo test -p aliquot-controller --test chaos -- --nocapture

.PHONY: variants
variants: build-hook ## All of the limiter's tests under every variant of a device; most of an hour.
	@tools/test-variants

.PHONY: sanitize
sanitize: ## Miri and sanitizers over the limiter, where a nightly toolchain is; some minutes.
	@tools/sanitize

.PHONY: fuzz
fuzz: ## Fuzzers over the readers of what others write; an hour. SECONDS=.
	@tools/fuzz $(or $(SECONDS),3600)

.PHONY: bench
bench: build ## Benchmarks, as tables and target/bench/*.json.
	@tools/bench

.PHONY: lint
lint: ## Formatting, clippy, licences and advisories, generated files.
	@tools/lint

.PHONY: generate
generate: ## CustomResourceDefinitions of the chart, rendered manifests, and docs/reference.
	@tools/generate

.PHONY: cluster
cluster: build ## A real single-node Kubernetes with simulated GPUs, left running; prints its kubeconfig.
	@tools/cluster-up

.PHONY: install
install: ## The commands aliquot and kubectl-aliquot into PREFIX=/usr/local (DESTDIR= for packages).
	@cargo build --quiet --locked --release -p aliquot
	@install -D -m 755 $(TARGET)/release/aliquot $(DESTDIR)$(PREFIX)/bin/aliquot
	@ln -sf aliquot $(DESTDIR)$(PREFIX)/bin/kubectl-aliquot
	@echo "$(DESTDIR)$(PREFIX)/bin/aliquot, which is kubectl aliquot, too"

.PHONY: image
image: ## The container image for amd64 and arm64 into dist/, without a container engine; a quarter of an hour each.
	@tools/image

.PHONY: release
release: ## Image, chart, CRDs, kubectl-aliquot, notes and checksums of this commit into dist/; half an hour.
	@tools/release

.PHONY: clean
clean: ## Stops the cluster and removes what was built.
	@e2e/cluster/down || true
	@cargo clean

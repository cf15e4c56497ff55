// Only marks the folder as a module: the build names one of v1.*.mod with
// -modfile, one for each Kubernetes minor.
module aliquot.dev/e2e/cluster/kube

go 1.26.0

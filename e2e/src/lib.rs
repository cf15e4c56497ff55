//! Tests of the whole product: against the simulators everywhere, against a real Kubernetes where one can run.

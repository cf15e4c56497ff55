//! An embedded Kubernetes control plane for the demo and for fault injection.

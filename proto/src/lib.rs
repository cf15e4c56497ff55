//! The kubelet's gRPC APIs: plugin registration, DRA, DRA health and pod resources.

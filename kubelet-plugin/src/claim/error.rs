//! The reasons why a claim cannot be prepared as it is, in words for its author.

use super::ClaimRef;
use aliquot_model::DeviceKind;
use aliquot_model::config::ConfigError;

/// The reason why a claim cannot be prepared as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The API has another claim of that name.
    #[error("claim {claim} no longer exists: the claim of that name has uid {found}")]
    OtherUid {
        /// The claim that the kubelet asked for.
        claim: ClaimRef,
        /// The UID of the claim that the API has.
        found: String,
    },
    /// The claim has no allocation.
    #[error("claim {0} is not allocated; its pod must wait for the allocator")]
    NotAllocated(ClaimRef),
    /// The name is not that of a device of this driver.
    #[error("request {request}: device {device:?} in pool {pool} is not a device of this driver")]
    UnknownDevice {
        /// The request.
        request: String,
        /// The pool.
        pool: String,
        /// The device.
        device: String,
    },
    /// The device belongs to another node.
    #[error("request {request}: device {device} belongs to pool {pool}, this node's pool is {own}")]
    OtherPool {
        /// The request.
        request: String,
        /// The device.
        device: String,
        /// The pool in the result.
        pool: String,
        /// This node's pool.
        own: String,
    },
    /// Admin access and the kind of the device do not fit together.
    #[error("request {request}: {reason}")]
    Admin {
        /// The request.
        request: String,
        /// The fault.
        reason: &'static str,
    },
    /// A share has no `consumedCapacity`, or an impossible one.
    #[error("request {request}: consumedCapacity.{capacity} of device {device} {reason}")]
    Capacity {
        /// The request.
        request: String,
        /// The device.
        device: String,
        /// The name of the capacity.
        capacity: &'static str,
        /// The fault in the capacity.
        reason: String,
    },
    /// Opaque parameters cannot be decoded.
    #[error("config entry {index} ({origin}): {error}")]
    Config {
        /// The position in `status.allocation.devices.config`.
        index: usize,
        /// `FromClass` or `FromClaim`.
        origin: String,
        /// The reason.
        error: ConfigError,
    },
    /// A config entry names a request whose device is of another kind.
    #[error(
        "config entry {index} ({origin}): {kind} does not apply to request {request}, whose device {device} is of type {device_kind}"
    )]
    ConfigMismatch {
        /// The position in `status.allocation.devices.config`.
        index: usize,
        /// `FromClass` or `FromClaim`.
        origin: String,
        /// The kind of the config.
        kind: &'static str,
        /// The request.
        request: String,
        /// The device.
        device: String,
        /// The kind of the device.
        device_kind: DeviceKind,
    },
    /// A tenant asked to fail open.
    #[error("config entry {index} (FromClaim): failMode Open may only be set in a DeviceClass")]
    FailOpenFromClaim {
        /// The position in `status.allocation.devices.config`.
        index: usize,
    },
}

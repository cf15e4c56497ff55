//! Why a claim cannot be prepared as it is, in words for its author.

use super::ClaimRef;
use aliquot_model::DeviceKind;
use aliquot_model::config::ConfigError;

/// Why a claim cannot be prepared as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// Another claim of that name.
    #[error("claim {claim} no longer exists: the claim of that name has uid {found}")]
    OtherUid {
        /// What the kubelet asked for.
        claim: ClaimRef,
        /// What the API has.
        found: String,
    },
    /// No allocation.
    #[error("claim {0} is not allocated; its pod must wait for the allocator")]
    NotAllocated(ClaimRef),
    /// A device name that is not ours.
    #[error("request {request}: device {device:?} in pool {pool} is not a device of this driver")]
    UnknownDevice {
        /// Request.
        request: String,
        /// Pool.
        pool: String,
        /// Device.
        device: String,
    },
    /// A device of another node.
    #[error("request {request}: device {device} belongs to pool {pool}, this node's pool is {own}")]
    OtherPool {
        /// Request.
        request: String,
        /// Device.
        device: String,
        /// Pool in the result.
        pool: String,
        /// Our pool.
        own: String,
    },
    /// Admin access and device kind do not go together.
    #[error("request {request}: {reason}")]
    Admin {
        /// Request.
        request: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// A share without or with impossible `consumedCapacity`.
    #[error("request {request}: consumedCapacity.{capacity} of device {device} {reason}")]
    Capacity {
        /// Request.
        request: String,
        /// Device.
        device: String,
        /// Name of the capacity.
        capacity: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// Opaque parameters that do not decode.
    #[error("config entry {index} ({origin}): {error}")]
    Config {
        /// Position in `status.allocation.devices.config`.
        index: usize,
        /// `FromClass` or `FromClaim`.
        origin: String,
        /// Why.
        error: ConfigError,
    },
    /// A config that names a request whose device is of another kind.
    #[error(
        "config entry {index} ({origin}): {kind} does not apply to request {request}, whose device {device} is of type {device_kind}"
    )]
    ConfigMismatch {
        /// Position.
        index: usize,
        /// `FromClass` or `FromClaim`.
        origin: String,
        /// Config kind.
        kind: &'static str,
        /// Request.
        request: String,
        /// Device.
        device: String,
        /// Its kind.
        device_kind: DeviceKind,
    },
    /// Fail-open asked for by a tenant.
    #[error("config entry {index} (FromClaim): failMode Open may only be set in a DeviceClass")]
    FailOpenFromClaim {
        /// Position.
        index: usize,
    },
}

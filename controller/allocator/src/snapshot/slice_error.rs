//! The reasons why ResourceSlices that were published cannot be allocated from.

use aliquot_model::quantity::QuantityError;

/// The reason why the slices of a pool do not make a layout. Names are as they were published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// A counter of a set has an amount that is not a quantity.
    #[error("counter set {set}: {source}")]
    CounterSet {
        /// The counter set.
        set: String,
        /// The amount that cannot be read.
        source: QuantityError,
    },
    /// A capacity or a consumed counter of a device is not a quantity.
    #[error("device {device}: {source}")]
    Device {
        /// The device.
        device: String,
        /// The amount that cannot be read.
        source: QuantityError,
    },
    /// Two counter sets of the pool have one name.
    #[error("counter set {0} is there twice")]
    SameSet(String),
    /// Two devices of the pool have one name.
    #[error("device {0} is there twice")]
    SameDevice(String),
    /// A device consumes of more counter sets than a draw has room for.
    #[error("device {0} consumes of more than two counter sets")]
    ManySets(String),
    /// A device consumes of a counter set that no slice publishes.
    #[error("device {device} consumes of counter set {set}, which is not published")]
    NoSet {
        /// The device.
        device: String,
        /// The counter set.
        set: String,
    },
    /// A device consumes a counter that its set does not have.
    #[error("device {device} consumes counter {counter} of set {set}, which is not published")]
    NoCounter {
        /// The device.
        device: String,
        /// The counter.
        counter: String,
        /// The counter set.
        set: String,
    },
}

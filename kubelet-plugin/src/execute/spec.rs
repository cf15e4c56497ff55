//! Reads and writes CDI specs and the device numbers that they name.

use super::{Machine, StepError};
use crate::device_number_reuse;
use crate::edits::{self, Nodes};
use crate::ledger::Record;
use aliquot_cdi::Spec;

/// The treatment of a result in a spec if its hardware is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// The spec is refused.
    Refused,
    /// The result gets no device in the spec: this is better than a device that the number means by now.
    LeftOut,
}

impl Missing {
    pub(super) fn settle(self, nodes: Result<Nodes, StepError>) -> Result<Nodes, StepError> {
        match nodes {
            Err(StepError::PartitionGone { .. }) if self == Self::LeftOut => Ok(Nodes::default()),
            Err(StepError::Gpu(error)) if self == Self::LeftOut && error.is_gone() => Ok(Nodes::default()),
            nodes => nodes,
        }
    }
}

impl Machine {
    /// Reads the claim's CDI spec from disk.
    ///
    /// # Errors
    /// Fails if the spec cannot be read.
    pub fn spec_on_disk(&self, record: &Record) -> Result<Option<Spec>, StepError> {
        Ok(self.cdi.read(&edits::spec_name(&self.site.driver, &record.claim.uid))?)
    }

    /// Writes the claim's CDI spec, and notes in the record the device numbers that it names.
    ///
    /// # Errors
    /// Fails with [`StepError`]; the spec is then unchanged.
    pub fn write_spec(&self, record: &mut Record, spec: &Spec) -> Result<(), StepError> {
        record.numbers.extend(device_number_reuse::named(spec));
        self.write_metadata(record)?;
        // The spec comes last: once it is there, everything that the claim's devices need is there.
        self.cdi.write(&edits::spec_name(&self.site.driver, &record.claim.uid), spec)?;
        Ok(())
    }
}

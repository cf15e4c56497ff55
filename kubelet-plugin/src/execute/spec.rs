//! CDI specs and the device numbers that they name.

use super::{Machine, StepError};
use crate::edits::{self, Nodes};
use crate::ledger::Record;
use crate::reach;
use aliquot_cdi::Spec;

/// What becomes of a result in a spec whose hardware is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// There is no such spec.
    Refused,
    /// It has no device there: none is better than one that the number means by now.
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
    /// The claim's CDI spec on disk.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn spec_on_disk(&self, record: &Record) -> Result<Option<Spec>, StepError> {
        Ok(self.cdi.read(&edits::spec_name(&self.site.driver, &record.claim.uid))?)
    }

    /// Writes the claim's CDI spec, and notes in the record which device numbers it names.
    ///
    /// # Errors
    /// [`StepError`]; the spec is then as it was.
    pub fn write_spec(&self, record: &mut Record, spec: &Spec) -> Result<(), StepError> {
        record.numbers.extend(reach::named(spec));
        self.write_metadata(record)?;
        // Last: where it is, all that the claim's devices need is there.
        self.cdi.write(&edits::spec_name(&self.site.driver, &record.claim.uid), spec)?;
        Ok(())
    }
}

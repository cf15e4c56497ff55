//! Defines what the driver's errors by number ("XIDs") mean for giving out a GPU. Pure: it does no I/O.
//!
//! Sources: NVIDIA's Xid catalogue of September 2026 (docs.nvidia.com/deploy/xid-errors, "Resolution Bucket
//! (Immediate Action)") gives the action for each error. An error that needs no action, or a restart of the
//! application, only informs. An error that needs a reset, a reboot, a look by people or a workflow refuses
//! new claims. The errors that NVIDIA's device plugin and DRA driver ignore are ignored here, too. A number
//! that is not in the table counts as an error of the GPU, as it does there.

use aliquot_model::layout::TaintEffect;
use std::collections::BTreeMap;
use std::fmt;

/// The consequence of an XID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// None: the application caused the error, and the GPU is as good as before.
    Ignore,
    /// A taint with this effect.
    Taint(TaintEffect),
}

impl Verdict {
    /// Parses a word of the command line: an effect, or `Ignore`.
    fn parse(text: &str) -> Option<Self> {
        if text == "Ignore" { Some(Self::Ignore) } else { TaintEffect::parse(text).map(Self::Taint) }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ignore => f.write_str("Ignore"),
            Self::Taint(effect) => f.write_str(effect.as_str()),
        }
    }
}

const IGNORE: Verdict = Verdict::Ignore;
/// The application has to be restarted at most; the GPU goes on.
const INFORM: Verdict = Verdict::Taint(TaintEffect::None);
/// Running programs may finish; then the GPU needs a reset or a check.
const REFUSE: Verdict = Verdict::Taint(TaintEffect::NoSchedule);
/// Nothing on the GPU can go on.
const EVICT: Verdict = Verdict::Taint(TaintEffect::NoExecute);

/// The XID numbers, with the verdict and the meaning.
const TABLE: [(&[u64], Verdict, &str); 57] = [
    (&[8], INFORM, "the GPU stopped processing for an application"),
    (&[11, 25, 32], INFORM, "a damaged stream of commands"),
    (&[13], IGNORE, "an exception of the graphics engine"),
    (&[31], IGNORE, "a page fault of an application"),
    (&[37, 38], INFORM, "an error of the driver's firmware"),
    (&COPY_ENGINES, INFORM, "an exception of a copy engine"),
    (&[43], IGNORE, "an application's channel was stopped"),
    (&[44], INFORM, "a fault while contexts were switched"),
    (&[45], IGNORE, "an application's channels were cleaned up"),
    (&[46], REFUSE, "the GPU stopped processing"),
    (&[48], REFUSE, "a memory error that could not be corrected"),
    (&[54], REFUSE, "the board's power cable is not connected"),
    (&[60], INFORM, "an exception of the security processor"),
    (&[61], REFUSE, "a breakpoint of an internal microcontroller"),
    (&[62], REFUSE, "an internal microcontroller halted"),
    (&[63], INFORM, "a row of memory will be replaced at the next reset"),
    (&[64], REFUSE, "a row of memory could not be replaced"),
    (&[66, 67], INFORM, "the driver accessed a register that it may not"),
    (&[68], IGNORE, "an exception of a video decoder"),
    (&[69], INFORM, "an error of the graphics engine's class"),
    (&[74], REFUSE, "an error of NVLink"),
    (&[78], INFORM, "a virtual GPU did not start"),
    (&[79], EVICT, "the GPU has fallen off the bus"),
    (&[80], INFORM, "damaged data were sent to the GPU"),
    (&VIDEO_ENGINES, INFORM, "an exception of a video, image or optical flow engine"),
    (&[92], INFORM, "many memory errors were corrected"),
    (&[93], INFORM, "the board's information memory is written too often"),
    (&[94], INFORM, "a memory error that was contained to an application"),
    (&[95], EVICT, "a memory error that was not contained"),
    (&[106, 107], INFORM, "a test message of the management bus"),
    // The catalogue asks for a reset; NVIDIA's plugin and DRA driver ignore the error. If the driver itself
    // wants a reset, the GPU's recovery action says so, which is read separately.
    (&[109], INFORM, "a context switch timed out"),
    (&[110], REFUSE, "a security fault"),
    (&[119], REFUSE, "the GPU's system processor does not answer"),
    (&[120], REFUSE, "an error of the GPU's system processor"),
    (&[121], INFORM, "an error of the link to the CPU was corrected"),
    (&[136], REFUSE, "an NVLink could not be trained"),
    (&[137], INFORM, "an application accessed the memory of another GPU that it may not"),
    (&[140], REFUSE, "an unrecovered memory error"),
    (&[141], INFORM, "an error of CUDA's fast path"),
    (&[143], REFUSE, "the GPU could not be initialised"),
    (&[144, 145, 146, 147, 148, 149, 150], REFUSE, "an error of NVLink"),
    (&[151], REFUSE, "encryption keys could not be changed"),
    (&[152, 153], INFORM, "an error of the deep learning accelerator"),
    // The kernel's log and the GPU's recovery action say what is to be done.
    (&[154], INFORM, "the driver wants something else done about the GPU than before"),
    (&[155], REFUSE, "an error of NVLink that software defines"),
    (&[156], REFUSE, "a part of the GPU is retired at the next reset"),
    (&[157], INFORM, "a part of the GPU could not be retired"),
    (&[158], REFUSE, "the GPU does not answer in time"),
    (&[159], REFUSE, "an error of the link to the CPU"),
    (&[160], INFORM, "a channel of the memory was retired"),
    (&[161], INFORM, "a channel of the memory could not be retired"),
    (&[162, 163, 164, 165], INFORM, "the state of the board's power smoothing changed"),
    (&[167], REFUSE, "the PCIe link does not answer in time"),
    (&[168], REFUSE, "the GPU has less memory, for some of it is damaged"),
    (&[169], REFUSE, "an internal microcontroller halted"),
    (&[171], INFORM, "more about an error of the memory"),
    (&[172], INFORM, "more about an error of the memory on the chip"),
];

const COPY_ENGINES: [u64; 20] =
    [39, 40, 41, 70, 71, 72, 75, 76, 77, 85, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135];
const VIDEO_ENGINES: [u64; 17] = [82, 83, 84, 86, 88, 89, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 139];

fn of_table(number: u64) -> Option<&'static (&'static [u64], Verdict, &'static str)> {
    TABLE.iter().find(|(numbers, ..)| numbers.contains(&number))
}

/// The table, with the administrator's changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Xids(BTreeMap<u64, Verdict>);

impl Xids {
    /// Creates the table with these changes; the last change of a number counts.
    pub fn new(changes: impl IntoIterator<Item = (u64, Verdict)>) -> Self {
        Self(changes.into_iter().collect())
    }

    /// Returns the verdict on an XID.
    pub fn verdict(&self, number: u64) -> Verdict {
        let known = || of_table(number).map(|(_, verdict, _)| *verdict);
        self.0.get(&number).copied().or_else(known).unwrap_or(REFUSE)
    }

    /// Returns the meaning of an XID, if it is known.
    pub fn meaning(number: u64) -> Option<&'static str> {
        of_table(number).map(|(.., meaning)| *meaning)
    }
}

/// The fault in the text of a change of the table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The text has no `=`.
    #[error("{CHANGE}")]
    NoEffect,
    /// The text before the `=` is no number.
    #[error("{0:?} is no XID: {CHANGE}")]
    NoXid(String),
    /// The text after the `=` is no effect.
    #[error("{0:?} is no effect: {CHANGE}")]
    UnknownEffect(String),
}

/// The form of a change, for messages.
const CHANGE: &str = "expected NUMBER=None, NoSchedule, NoExecute or Ignore, such as 94=NoSchedule";

/// Parses `NUMBER=None|NoSchedule|NoExecute|Ignore`.
///
/// # Errors
/// Fails with [`ChangeError`].
pub fn parse_change(text: &str) -> Result<(u64, Verdict), ChangeError> {
    let (number, verdict) = text.split_once('=').ok_or(ChangeError::NoEffect)?;
    let number = number.parse().map_err(|_| ChangeError::NoXid(number.to_owned()))?;
    let verdict = Verdict::parse(verdict).ok_or_else(|| ChangeError::UnknownEffect(verdict.to_owned()))?;
    Ok((number, verdict))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::of_the_application(31, IGNORE)]
    #[case::contained(94, INFORM)]
    #[case::needs_a_reset(48, REFUSE)]
    #[case::lost(79, EVICT)]
    #[case::not_contained(95, EVICT)]
    #[case::an_application_may_cause_it(137, INFORM)]
    #[case::asks_for_a_reset(158, REFUSE)]
    #[case::unknown(9999, REFUSE)]
    fn an_error_counts_by_its_class(#[case] number: u64, #[case] verdict: Verdict) {
        assert_eq!(Xids::default().verdict(number), verdict);
    }

    #[test]
    fn what_the_administrator_says_counts_before_the_table() {
        let changes = ["79=NoSchedule", "31=None", "48=Ignore", "9999=NoExecute"];
        let xids = Xids::new(changes.map(|text| parse_change(text).unwrap()));
        let verdicts = [79, 31, 48, 9999, 95].map(|number| xids.verdict(number).to_string());
        assert_eq!(verdicts, ["NoSchedule", "None", "Ignore", "NoExecute", "NoExecute"]);
    }

    #[rstest]
    #[case("79", "expected NUMBER=")]
    #[case("x=None", "\"x\" is no XID")]
    #[case("79=Never", "\"Never\" is no effect")]
    fn a_change_that_is_not_understood_is_refused(#[case] text: &str, #[case] reason: &str) {
        let said = parse_change(text).unwrap_err().to_string();
        assert!(said.starts_with(reason), "{said}");
    }

    #[test]
    fn every_number_stands_in_the_table_once() {
        let mut numbers: Vec<u64> = TABLE.iter().flat_map(|(numbers, ..)| *numbers).copied().collect();
        let all = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), all);
    }

    #[test]
    fn the_document_has_the_table() {
        let text = include_str!("../../../docs/health.md");
        for verdict in [IGNORE, INFORM, REFUSE, EVICT] {
            let row = text.lines().find(|line| line.starts_with(&format!("| {verdict} |"))).unwrap();
            let said = row.split('|').nth(3).unwrap().trim();
            let said = said.strip_suffix(", and every number that is not in this table").unwrap_or(said);
            assert_eq!(said, listed(verdict), "the row of {verdict}");
        }
    }

    /// Numbers of a verdict as people write them: 144 to 150 is `144–150`.
    fn listed(verdict: Verdict) -> String {
        let mut numbers: Vec<u64> =
            TABLE.iter().filter(|row| row.1 == verdict).flat_map(|(numbers, ..)| *numbers).copied().collect();
        numbers.sort_unstable();
        let runs = numbers.chunk_by(|a, b| a + 1 == *b);
        let words = runs.flat_map(|run| match run {
            [first, _, .., last] => vec![format!("{first}–{last}")],
            few => few.iter().map(u64::to_string).collect(),
        });
        words.collect::<Vec<_>>().join(", ")
    }
}

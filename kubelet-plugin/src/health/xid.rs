//! What the driver's errors by number ("XIDs") mean for whom a GPU may be given to. Pure.
//!
//! Sources: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, "Resolution Bucket (Immediate Action)") for what
//! has to be done; the lists that NVIDIA's device plugin and DRA driver ignore for what applications cause. A number
//! that is not in the table counts as an error of the GPU, as there.

use aliquot_model::layout::TaintEffect;
use std::collections::BTreeMap;
use std::fmt;

/// What is made of an XID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Nothing: the application caused it, and the GPU is as good as before.
    Ignore,
    /// A taint with this effect.
    Taint(TaintEffect),
}

impl Verdict {
    /// From a word of the command line: an effect, or `Ignore`.
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
/// What runs may go on to its end; then the GPU needs a reset or a look.
const REFUSE: Verdict = Verdict::Taint(TaintEffect::NoSchedule);
/// Nothing on the GPU can go on.
const EVICT: Verdict = Verdict::Taint(TaintEffect::NoExecute);

/// Number, what is made of it, what it is.
const TABLE: [(u64, Verdict, &str); 43] = [
    (8, INFORM, "the GPU stopped processing for an application"),
    (11, INFORM, "a damaged stream of commands"),
    (13, IGNORE, "an exception of the graphics engine"),
    (31, IGNORE, "a page fault of an application"),
    (32, INFORM, "a damaged push buffer"),
    (39, INFORM, "an exception of a copy engine"),
    (40, INFORM, "an exception of a copy engine"),
    (41, INFORM, "an exception of a copy engine"),
    (43, IGNORE, "an application's channel was stopped"),
    (45, IGNORE, "an application's channels were cleaned up"),
    (46, REFUSE, "the GPU stopped processing"),
    (48, REFUSE, "a memory error that could not be corrected"),
    (61, REFUSE, "a breakpoint of an internal microcontroller"),
    (62, REFUSE, "an internal microcontroller halted"),
    (63, INFORM, "a row of memory will be replaced at the next reset"),
    (64, REFUSE, "a row of memory could not be replaced"),
    (68, IGNORE, "an exception of the video processor"),
    (69, INFORM, "an error of the graphics engine's class"),
    (74, REFUSE, "an error of NVLink"),
    (79, EVICT, "the GPU has fallen off the bus"),
    (92, INFORM, "many memory errors were corrected"),
    (94, INFORM, "a memory error that was contained to an application"),
    (95, EVICT, "a memory error that was not contained"),
    (109, IGNORE, "a context switch timed out"),
    (110, REFUSE, "a security fault"),
    (119, REFUSE, "the GPU's system processor does not answer"),
    (120, REFUSE, "an error of the GPU's system processor"),
    (121, INFORM, "an error of the link to the CPU was corrected"),
    (136, REFUSE, "an NVLink could not be trained"),
    (140, REFUSE, "an unrecovered memory error"),
    (143, REFUSE, "the GPU could not be initialised"),
    (144, REFUSE, "an error of NVLink"),
    (145, REFUSE, "an error of NVLink"),
    (146, REFUSE, "an error of NVLink"),
    (147, REFUSE, "an error of NVLink"),
    (148, REFUSE, "an error of NVLink"),
    (149, REFUSE, "an error of NVLink"),
    (150, REFUSE, "an error of NVLink"),
    // What is to be done stands in the kernel's log and in the GPU's recovery action, which is read by itself.
    (154, INFORM, "the driver wants something else done about the GPU than before"),
    (156, INFORM, "a part of the memory was retired"),
    (157, REFUSE, "a part of the memory could not be retired"),
    (171, INFORM, "more about an error of the memory"),
    (172, INFORM, "more about an error of the memory on the chip"),
];

/// The table with what the administrator says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Xids(BTreeMap<u64, Verdict>);

impl Xids {
    /// The table with these changes; the last one about a number counts.
    pub fn new(changes: impl IntoIterator<Item = (u64, Verdict)>) -> Self {
        Self(changes.into_iter().collect())
    }

    /// What is made of an XID.
    pub fn verdict(&self, number: u64) -> Verdict {
        let known = || TABLE.iter().find(|(known, ..)| *known == number).map(|(_, verdict, _)| *verdict);
        self.0.get(&number).copied().or_else(known).unwrap_or(REFUSE)
    }

    /// What it is, if it is known.
    pub fn meaning(number: u64) -> Option<&'static str> {
        TABLE.iter().find(|(known, ..)| *known == number).map(|(.., meaning)| *meaning)
    }
}

/// Reads `NUMBER=None|NoSchedule|NoExecute|Ignore`.
///
/// # Errors
/// What is wrong with the text.
pub fn parse_change(text: &str) -> Result<(u64, Verdict), String> {
    let wanted = "expected NUMBER=None, NoSchedule, NoExecute or Ignore, such as 94=NoSchedule";
    let (number, verdict) = text.split_once('=').ok_or(wanted)?;
    let number = number.parse().map_err(|_| format!("{number:?} is no XID: {wanted}"))?;
    let verdict = Verdict::parse(verdict).ok_or_else(|| format!("{verdict:?} is no effect: {wanted}"))?;
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
        let said = parse_change(text).unwrap_err();
        assert!(said.starts_with(reason), "{said}");
    }

    #[test]
    fn every_number_stands_in_the_table_once() {
        assert!(TABLE.is_sorted_by(|a, b| a.0 < b.0));
    }
}

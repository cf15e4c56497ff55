//! Parses the annotation by which a claim asks for other limits: `memory=20Gi,cores=40`, or per request
//! `chat: memory=20Gi; embed: cores=10`.

use super::Size;
use crate::quantity::Quantity;
use aliquot_model::names::LIMITS;
use aliquot_model::quantity::QuantityError;

/// The step in which memory is given, in bytes.
const STEP: u64 = 1 << 20;

/// The longest annotation that is read, in bytes, and the most parts that it may have: enough for 32 requests
/// with eight alternatives each. The limits are needed because whoever may write the annotation makes the
/// controller read it again and again.
const LONGEST: usize = 32 << 10;
const MOST_PARTS: usize = 256;

/// The size that is asked for the shares of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The request; `None` stands for every request that is not named.
    pub request: Option<String>,
    /// Bytes of memory; `None` means the allocated amount.
    pub memory: Option<u64>,
    /// Percent of compute; `None` means the allocated amount.
    pub cores: Option<u64>,
}

/// The sizes that a claim asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wish {
    /// The parts, in the order of the annotation.
    pub parts: Vec<Part>,
}

/// The reason why the annotation cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {LIMITS}: {0}; write for example memory=20Gi,cores=40, or <request>: memory=20Gi")]
pub struct WishError(Mistake);

/// What is wrong in the annotation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Mistake {
    #[error("it has {0} bytes, {LONGEST} are the most")]
    TooLong(usize),
    #[error("it has more than {MOST_PARTS} parts, more than a claim has requests")]
    TooManyParts,
    #[error("it is empty")]
    Empty,
    #[error("{} stands in it twice", .0.as_deref().map_or_else(|| "all requests".to_owned(), |r| format!("request {r}")))]
    RequestTwice(Option<String>),
    #[error("{0} stands in it twice")]
    FieldTwice(String),
    #[error("{0:?} names no request")]
    NoRequest(String),
    #[error("{0:?} is neither memory=… nor cores=…")]
    NoField(String),
    #[error("{0:?} cannot be changed, only memory and cores can")]
    UnknownField(String),
    #[error("{0:?} says neither memory nor cores")]
    NothingSaid(String),
    #[error("memory {0:?} is no quantity: {1}")]
    NoQuantity(String, QuantityError),
    #[error("memory {0} is not between 1Mi and what a GPU has")]
    Memory(String),
    #[error("cores {0:?} is not a number from 1 to 100 (percent of a GPU)")]
    Cores(String),
}

impl Wish {
    /// Parses the annotation.
    ///
    /// # Errors
    /// [`WishError`], for the author of the annotation.
    pub fn parse(text: &str) -> Result<Self, WishError> {
        parse(text).map_err(WishError)
    }

    /// Returns the size that a share of a request (`main` or `main/sub`) is to have, if `given` was
    /// allocated.
    pub fn of(&self, request: &str, given: Size) -> Size {
        let main = request.split('/').next().unwrap_or(request);
        let named = self
            .parts
            .iter()
            .find(|part| part.request.as_deref().is_some_and(|named| named == request || named == main));
        let part = named.or_else(|| self.parts.iter().find(|part| part.request.is_none()));
        Size {
            memory: part.and_then(|part| part.memory).unwrap_or(given.memory),
            cores: part.and_then(|part| part.cores).unwrap_or(given.cores),
        }
    }
}

fn parse(text: &str) -> Result<Wish, Mistake> {
    if text.len() > LONGEST {
        return Err(Mistake::TooLong(text.len()));
    }
    let mut wish = Wish::default();
    for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
        let part = parse_part(part)?;
        if wish.parts.iter().any(|other| other.request == part.request) {
            return Err(Mistake::RequestTwice(part.request));
        }
        if wish.parts.len() == MOST_PARTS {
            return Err(Mistake::TooManyParts);
        }
        wish.parts.push(part);
    }
    if wish.parts.is_empty() { Err(Mistake::Empty) } else { Ok(wish) }
}

fn parse_part(text: &str) -> Result<Part, Mistake> {
    let (request, fields) = match text.split_once(':') {
        Some((request, _)) if request.trim().is_empty() => return Err(Mistake::NoRequest(text.to_owned())),
        Some((request, fields)) => (Some(request.trim().to_owned()), fields),
        None => (None, text),
    };
    let mut part = Part { request, memory: None, cores: None };
    for field in fields.split(',').map(str::trim).filter(|field| !field.is_empty()) {
        let Some((name, value)) = field.split_once('=') else {
            return Err(Mistake::NoField(field.to_owned()));
        };
        let (name, value) = (name.trim(), value.trim());
        let twice = match name {
            "memory" => part.memory.replace(memory(value)?).is_some(),
            "cores" => part.cores.replace(cores(value)?).is_some(),
            _ => return Err(Mistake::UnknownField(name.to_owned())),
        };
        if twice {
            return Err(Mistake::FieldTwice(name.to_owned()));
        }
    }
    if part.memory.is_none() && part.cores.is_none() {
        return Err(Mistake::NothingSaid(text.to_owned()));
    }
    Ok(part)
}

/// Parses an amount of memory; returns bytes, rounded up to the next step.
fn memory(text: &str) -> Result<u64, Mistake> {
    let quantity: Quantity = text.parse().map_err(|error| Mistake::NoQuantity(text.to_owned(), error))?;
    let bytes =
        quantity.to_u64().filter(|bytes| *bytes > 0).and_then(|bytes| bytes.checked_next_multiple_of(STEP));
    bytes.ok_or_else(|| Mistake::Memory(text.to_owned()))
}

/// Parses a percentage of compute from 1 to 100. 0 is refused, as it would mean no limit.
fn cores(text: &str) -> Result<u64, Mistake> {
    let percent = text.parse::<u64>().ok().filter(|percent| (1..=100).contains(percent));
    percent.ok_or_else(|| Mistake::Cores(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const GIB: u64 = 1 << 30;
    const GIVEN: Size = Size { memory: 10 * GIB, cores: 30 };

    #[rstest]
    #[case::both("memory=20Gi,cores=40", "a", (20 * GIB, 40))]
    #[case::spaces(" memory = 20Gi , cores = 40 ; ", "a", (20 * GIB, 40))]
    #[case::only_memory("memory=5Gi", "a", (5 * GIB, 30))]
    #[case::only_cores("cores=1", "a", (10 * GIB, 1))]
    #[case::rounded_up("memory=1", "a", (1 << 20, 30))]
    #[case::named("a: memory=5Gi; b: cores=50", "b", (10 * GIB, 50))]
    #[case::another("a: memory=5Gi", "b", (10 * GIB, 30))]
    #[case::the_others("a: memory=5Gi; cores=7", "b", (10 * GIB, 7))]
    #[case::subrequest("a: memory=5Gi", "a/large", (5 * GIB, 30))]
    fn a_share_is_to_have_what_is_said_and_else_what_it_has(
        #[case] text: &str,
        #[case] request: &str,
        #[case] (memory, cores): (u64, u64),
    ) {
        assert_eq!(Wish::parse(text).expect("fine").of(request, GIVEN), Size { memory, cores });
    }

    #[rstest]
    #[case::empty("", "it is empty")]
    #[case::no_field("a:", "says neither memory nor cores")]
    #[case::word("more", "neither memory=… nor cores=…")]
    #[case::unknown("slots=2", "only memory and cores can")]
    #[case::no_quantity("memory=much", "is no quantity")]
    #[case::nothing("memory=0", "is not between 1Mi")]
    #[case::negative("memory=-1Gi", "is not between 1Mi")]
    #[case::too_much("memory=16Ei", "is not between 1Mi")]
    #[case::no_limit("cores=0", "from 1 to 100")]
    #[case::more_than_a_gpu("cores=101", "from 1 to 100")]
    #[case::twice("memory=1Gi,memory=2Gi", "memory stands in it twice")]
    #[case::request_twice("a: memory=1Gi; a: cores=2", "request a stands in it twice")]
    #[case::no_request(": memory=1Gi", "names no request")]
    fn mistakes_are_named_with_an_example(#[case] text: &str, #[case] words: &str) {
        let error = Wish::parse(text).expect_err("a mistake").to_string();
        assert!(error.contains(words) && error.contains("write for example"), "{error}");
    }

    #[test]
    fn what_is_longer_than_any_claim_can_need_is_not_read() {
        let parts = |count: usize| -> String { (0..count).map(|n| format!("r{n}:cores=1;")).collect() };
        assert!(Wish::parse(&parts(MOST_PARTS)).is_ok());
        let error = Wish::parse(&parts(MOST_PARTS + 1)).expect_err("too many").to_string();
        assert!(error.contains("more than 256 parts"), "{error}");
        let error = Wish::parse(&parts(20_000)).expect_err("too long").to_string();
        assert!(error.contains("32768 are the most"), "{error}");
        assert!(error.len() < 300, "{error}");
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics_or_asks_for_no_limit(text in "[a-z:;,= 0-9.GiMk-]{0,40}") {
            if let Ok(wish) = Wish::parse(&text) {
                let size = wish.of("a", GIVEN);
                proptest::prop_assert!(size.memory > 0 && size.memory % (1 << 20) == 0 && size.cores > 0);
            }
        }
    }
}

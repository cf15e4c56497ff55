//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use aliquot_sim_node::{Fault, GpuSpec, NodeSpec, ProcessView, Record};

use crate::CliError;

/// What is printed where the command line is not understood.
pub(crate) const USAGE: &str = "\
usage: aliquot-sim [--node DIR] COMMAND      (DIR: default $ALIQUOT_SIM_NODE, else /run/aliquot-sim)

  create [--spec FILE] [--seed TEXT] [--record FILE] [--late-uvm] [BOARD[:mig][*COUNT]]...
                                   make the node; boards such as H100-80*8 or A100-40:mig;
                                   the driver like that of a record of e2e/gpu;
                                   without the module nvidia-uvm until load-uvm
  show [--json]                    GPUs, partitions, memory, processes, faults
  xid GPU NUMBER                   report an XID (79 also takes the GPU off the bus)
  ecc GPU [--uncorrected] [COUNT]  report memory errors
  fail FUNCTION CODE [--nth N] [--times N|all]
                                   fail the N-th call of an NVML or CUDA function, counted from now
  delay FUNCTION MILLISECONDS [--nth N] [--times N|all]
  clear [ID]                       remove one fault or all
  view host|own|empty|not-available
                                   how NVML names processes
  load-uvm                         load the module nvidia-uvm
  unload [--force]                 unload the module nvidia; by force also while it is in use
  load [--renumber] [VERSION]      load it, as part of a driver of that version; with other
                                   minor numbers of GPUs, and major numbers of nvidia-caps and
                                   nvidia-uvm, than before
  reset GPU                        reset a GPU: the pending MIG mode comes, instances go
  reboot                           reboot the node";

/// The command line, understood.
#[derive(Debug, PartialEq)]
pub(crate) struct Args {
    pub(crate) node: Option<PathBuf>,
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Command {
    Help,
    Create(CreateRequest),
    Show { json: bool },
    Xid { gpu: usize, xid: u64 },
    Ecc { gpu: usize, uncorrected: bool, count: u64 },
    Fault(Fault),
    Clear(Option<u64>),
    View(ProcessView),
    LoadUvm,
    Unload { force: bool },
    Load { renumber: bool, version: Option<String> },
    Reset(usize),
    Reboot,
}

/// What node to make.
#[derive(Debug, PartialEq, Default)]
pub(crate) struct CreateRequest {
    file: Option<PathBuf>,
    seed: Option<String>,
    record: Option<PathBuf>,
    late_uvm: bool,
    boards: Vec<GpuSpec>,
}

impl CreateRequest {
    /// The specification, from the file or from the boards named; libraries come from beside this program.
    pub(crate) fn spec(self) -> Result<NodeSpec, CliError> {
        let mut spec = match self.file {
            None => NodeSpec { gpus: self.boards, ..NodeSpec::new(Vec::<String>::new()) },
            Some(path) => {
                let bad = |reason: String| CliError::Spec { path: path.clone(), reason };
                let text = std::fs::read_to_string(&path).map_err(|e| bad(e.to_string()))?;
                let mut spec: NodeSpec = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
                spec.gpus.extend(self.boards);
                spec
            }
        };
        if let Some(seed) = self.seed {
            spec.seed = seed;
        }
        if let Some(path) = self.record {
            spec = spec.recorded(&Record::read(&path)?);
        }
        spec.late_uvm |= self.late_uvm;
        spec = spec.with_built_libraries();
        spec.nvidia_smi = spec.nvidia_smi.or_else(|| std::env::current_exe().ok());
        Ok(spec)
    }
}

/// Understands the words after the program's name.
pub(crate) fn parse(words: &[String]) -> Result<Args, String> {
    let mut words = Words { rest: words.to_vec() };
    let node = words.option("--node")?.map(PathBuf::from);
    if words.flag("--help") || words.flag("-h") {
        return Ok(Args { node, command: Command::Help });
    }
    let command = match words.next("a command")?.as_str() {
        "help" => Command::Help,
        "create" => Command::Create(CreateRequest {
            file: words.option("--spec")?.map(PathBuf::from),
            seed: words.option("--seed")?,
            record: words.option("--record")?.map(PathBuf::from),
            late_uvm: words.flag("--late-uvm"),
            boards: words.all_boards()?,
        }),
        "show" => Command::Show { json: words.flag("--json") },
        "xid" => Command::Xid { gpu: words.number("a GPU index")?, xid: words.number("an XID")? },
        "ecc" => Command::Ecc {
            uncorrected: words.flag("--uncorrected"),
            gpu: words.number("a GPU index")?,
            count: if words.rest.is_empty() { 1 } else { words.number("a count")? },
        },
        "fail" => {
            let (nth, times) = words.calls(1)?;
            let (function, code) = (words.next("a function")?, words.number("a return code")?);
            Command::Fault(Fault { function, nth, times, delay: Duration::ZERO, gpu: None, code: Some(code) })
        }
        "delay" => {
            let (nth, times) = words.calls(u64::MAX)?;
            let (function, ms) = (words.next("a function")?, words.number("milliseconds")?);
            Command::Fault(Fault {
                function,
                nth,
                times,
                delay: Duration::from_millis(ms),
                gpu: None,
                code: None,
            })
        }
        "clear" if words.rest.is_empty() => Command::Clear(None),
        "clear" => Command::Clear(Some(words.number("a fault's id")?)),
        "view" => Command::View(match words.next("a view")?.as_str() {
            "host" => ProcessView::Host,
            "own" => ProcessView::Own,
            "empty" => ProcessView::Empty,
            "not-available" => ProcessView::NotAvailable,
            other => return Err(format!("no process view {other:?}")),
        }),
        "load-uvm" => Command::LoadUvm,
        "unload" => Command::Unload { force: words.flag("--force") },
        "load" => Command::Load {
            renumber: words.flag("--renumber"),
            version: if words.rest.is_empty() { None } else { Some(words.next("a version")?) },
        },
        "reset" => Command::Reset(words.number("a GPU index")?),
        "reboot" => Command::Reboot,
        other => return Err(format!("no command {other:?}")),
    };
    match words.rest.first() {
        Some(extra) => Err(format!("{extra:?} is one word too many")),
        None => Ok(Args { node, command }),
    }
}

struct Words {
    rest: Vec<String>,
}

impl Words {
    fn next(&mut self, what: &str) -> Result<String, String> {
        if self.rest.is_empty() { Err(format!("{what} is missing")) } else { Ok(self.rest.remove(0)) }
    }

    fn number<N: std::str::FromStr>(&mut self, what: &str) -> Result<N, String> {
        let word = self.next(what)?;
        word.parse().map_err(|_| format!("{word:?} is not {what}"))
    }

    fn flag(&mut self, name: &str) -> bool {
        let before = self.rest.len();
        self.rest.retain(|w| w != name);
        self.rest.len() < before
    }

    fn option(&mut self, name: &str) -> Result<Option<String>, String> {
        let Some(place) = self.rest.iter().position(|w| w == name) else { return Ok(None) };
        self.rest.remove(place);
        if place < self.rest.len() {
            Ok(Some(self.rest.remove(place)))
        } else {
            Err(format!("{name} needs a value"))
        }
    }

    fn calls(&mut self, usual_times: u64) -> Result<(u64, u64), String> {
        let count = |word: Option<String>, usual: u64| match word.as_deref() {
            None => Ok(usual),
            Some("all") => Ok(u64::MAX),
            Some(word) => word.parse().map_err(|_| format!("{word:?} is not a number of calls")),
        };
        Ok((count(self.option("--nth")?, 1)?, count(self.option("--times")?, usual_times)?))
    }

    fn all_boards(&mut self) -> Result<Vec<GpuSpec>, String> {
        let mut boards = Vec::new();
        for word in std::mem::take(&mut self.rest) {
            let (board, count) = match word.split_once('*') {
                None => (word.as_str(), 1),
                Some((board, count)) => {
                    (board, count.parse().map_err(|_| format!("{count:?} in {word:?} is not a number"))?)
                }
            };
            let gpu = match board.split_once(':') {
                None => GpuSpec::new(board),
                Some((board, "mig")) => GpuSpec::new(board).with_mig(),
                Some((_, other)) => return Err(format!("{other:?} in {word:?} is not \"mig\"")),
            };
            boards.extend(std::iter::repeat_n(gpu, count));
        }
        Ok(boards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Args, String> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn boards_can_be_counted_and_put_in_mig_mode() {
        let Command::Create(request) = parsed("create H100-80*2 A100-40:mig --seed s").unwrap().command
        else {
            panic!("not a create");
        };
        let expected = [GpuSpec::new("H100-80"), GpuSpec::new("H100-80"), GpuSpec::new("A100-40").with_mig()];
        assert_eq!(request.boards, expected);
        assert_eq!(request.seed.as_deref(), Some("s"));
    }

    #[test]
    fn a_fault_takes_its_calls_from_options_anywhere() {
        let args = parsed("fail --nth 3 nvmlInit_v2 9 --node /n").unwrap();
        assert_eq!(args.node, Some(PathBuf::from("/n")));
        assert_eq!(args.command, Command::Fault(Fault::fail("nvmlInit_v2", 3, 9)));
        let args = parsed("delay cuInit 20").unwrap();
        assert_eq!(args.command, Command::Fault(Fault::delay("cuInit", Duration::from_millis(20))));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (line, word) in [
            ("", "command"),
            ("explode", "explode"),
            ("xid zero 1", "zero"),
            ("reset 0 1", "\"1\""),
            ("create A30:gim", "gim"),
            ("fail f", "return code"),
            ("show --node", "--node"),
        ] {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}

//! This process's rank, read from the variables of torchrun, Open MPI, Slurm, Kubeflow and
//! `--gpus`.

use std::hash::{DefaultHasher, Hash, Hasher};

use fireclay_kernels::Rank;

use crate::failure::Failure;

/// A rank and the address of rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Rank and world size.
    pub rank: Rank,
    /// Local rank: the index of this rank on its machine, and of its device.
    pub local: usize,
    /// The host on which rank 0 listens.
    pub host: String,
    /// Rank 0's port.
    pub port: u16,
    /// Run token: ranks of one run share it, and rank 0 refuses connections with another one.
    pub word: String,
    /// Whether `--gpus` started this rank: then the launcher watches it and reports its failure.
    pub is_watched: bool,
}

/// How a command that supports several ranks starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// As a single process.
    Alone,
    /// As one rank of several.
    Rank(Place),
    /// As a launcher of `count` ranks.
    Launch {
        /// Ranks to start on this machine.
        count: usize,
        /// The lowest of these ranks.
        first: usize,
        /// World size: ranks on all machines.
        all: usize,
        /// Host and port of rank 0, if a cluster launcher sets them.
        at: Option<(String, u16)>,
    },
}

/// Run token of the ranks that `--gpus` starts. Only these have it set.
pub(super) const WATCHED: &str = "FIRECLAY_RANKS";
/// Overrides the port of rank 0.
const PORT: &str = "FIRECLAY_PORT";

/// Looks up an environment variable.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Start {
    /// Decides from `gpus`, the value of `--gpus`, and the launcher's environment variables.
    ///
    /// # Errors
    /// If they contradict each other, or a variable is missing or malformed.
    pub fn of(gpus: Option<usize>) -> Result<Self, Failure> {
        Self::read(gpus, &|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn read(gpus: Option<usize>, environment: Environment<'_>) -> Result<Self, Failure> {
        if let Some(word) = environment(WATCHED) {
            let place = Place { word, is_watched: true, ..torchrun(environment)?.unwrap_or_else(Place::alone) };
            return Ok(if place.rank.ranks == 1 { Self::Alone } else { Self::Rank(place) });
        }
        // Kubeflow sets RANK and WORLD_SIZE per pod, without LOCAL_RANK.
        let is_machine = environment("RANK").is_some() && environment("LOCAL_RANK").is_none();
        if is_machine && environment("WORLD_SIZE").is_some() {
            return machines(gpus.unwrap_or(1), environment);
        }
        let found = match torchrun(environment)? {
            Some(place) => Some(("torchrun", place)),
            None => match open_mpi(environment)? {
                Some(place) => Some(("mpirun", place)),
                None => slurm(environment)?.map(|place| ("srun", place)),
            },
        };
        match (found, gpus) {
            (Some((launcher, _)), Some(count)) if count > 1 => Err(Failure::usage(format!(
                "--gpus {count} and {launcher} both start ranks: leave out --gpus, and have {launcher} start one for \
                 each GPU"
            ))),
            (Some((_, place)), _) if place.rank.ranks > 1 => Ok(Self::Rank(place)),
            (_, Some(count)) if count > 1 => Ok(Self::Launch { count, first: 0, all: count, at: None }),
            _ => Ok(Self::Alone),
        }
    }
}

impl Place {
    fn alone() -> Self {
        let (host, word) = ("127.0.0.1".into(), String::new());
        Self { rank: Rank::ONLY, local: 0, host, port: 0, word, is_watched: false }
    }
}

/// An environment variable as a whole number.
fn number(environment: Environment<'_>, name: &str) -> Result<Option<usize>, Failure> {
    let Some(text) = environment(name) else { return Ok(None) };
    let wrong = |_| Failure::usage(format!("{name} is {text}: it must be a whole number"));
    text.trim().parse().map(Some).map_err(wrong)
}

fn port(environment: Environment<'_>, name: &str) -> Result<Option<u16>, Failure> {
    let wrong = |_| Failure::usage(format!("{name} must be a port, from 1 to 65535"));
    number(environment, name)?.map(|port| u16::try_from(port).map_err(wrong)).transpose()
}

fn place(rank: usize, ranks: usize, local: usize, host: String, port: u16) -> Result<Place, Failure> {
    if rank >= ranks {
        return Err(Failure::usage(format!("RANK {rank} is not below the world size {ranks}")));
    }
    Ok(Place { rank: Rank { rank, ranks }, local, host, port, word: String::new(), is_watched: false })
}

/// The variables of torchrun, which other launchers set, too.
fn torchrun(environment: Environment<'_>) -> Result<Option<Place>, Failure> {
    let numbers =
        (number(environment, "RANK")?, number(environment, "WORLD_SIZE")?, number(environment, "LOCAL_RANK")?);
    let (Some(rank), Some(ranks), Some(local)) = numbers else { return Ok(None) };
    let (host, port) = master(environment)?;
    place(rank, ranks, local, host, port).map(Some)
}

/// Host and port of rank 0, from MASTER_ADDR and MASTER_PORT.
fn master(environment: Environment<'_>) -> Result<(String, u16), Failure> {
    let lacks = |name: &str| Failure::usage(format!("{name} is not set: ranks need the address of rank 0"));
    let host = environment("MASTER_ADDR").ok_or_else(|| lacks("MASTER_ADDR"))?;
    if let Some(port) = port(environment, PORT)? {
        return Ok((host, port));
    }
    let port = port(environment, "MASTER_PORT")?.ok_or_else(|| lacks("MASTER_PORT"))?;
    // torchrun's own store listens on MASTER_PORT, so the next port is used.
    let is_taken = environment("TORCHELASTIC_RUN_ID").is_some();
    Ok((host, if is_taken { port.checked_add(1).unwrap_or(port - 1) } else { port }))
}

/// One machine of several that each start `count` ranks.
fn machines(count: usize, environment: Environment<'_>) -> Result<Start, Failure> {
    let machine = number(environment, "RANK")?.unwrap_or(0);
    let machines = match number(environment, "PET_NNODES")? {
        Some(machines) => machines,
        None => number(environment, "WORLD_SIZE")?.unwrap_or(1),
    };
    if machine >= machines {
        return Err(Failure::usage(format!("RANK is {machine}, but there are only {machines} machines")));
    }
    let all = machines * count;
    if all == 1 {
        return Ok(Start::Alone);
    }
    let (host, port) = master(environment)?;
    if count == 1 {
        return place(machine, machines, 0, host, port).map(Start::Rank);
    }
    Ok(Start::Launch { count, first: machine * count, all, at: Some((host, port)) })
}

fn open_mpi(environment: Environment<'_>) -> Result<Option<Place>, Failure> {
    let of = |name: &str| number(environment, &format!("OMPI_COMM_WORLD_{name}"));
    let (Some(rank), Some(ranks), Some(local)) = (of("RANK")?, of("SIZE")?, of("LOCAL_RANK")?) else { return Ok(None) };
    let here = of("LOCAL_SIZE")?;
    let host = match environment("MASTER_ADDR") {
        Some(host) => host,
        None if here == Some(ranks) => "127.0.0.1".into(),
        None => {
            return Err(Failure::usage(
                "on several machines mpirun needs the address of rank 0: mpirun -x MASTER_ADDR=HOST -x \
                 MASTER_PORT=PORT",
            ));
        }
    };
    let own = [PORT, "MASTER_PORT"].into_iter().find_map(|name| port(environment, name).transpose()).transpose()?;
    let port = own.or_else(|| environment("PMIX_NAMESPACE").map(|job| port_of(&job)));
    let port =
        port.ok_or_else(|| Failure::usage("no job id from mpirun: pass the port with mpirun -x MASTER_PORT=PORT"))?;
    place(rank, ranks, local, host, port).map(Some)
}

/// A step of Slurm. An allocation's shell sets SLURM_NTASKS, too, although no task was launched.
fn slurm(environment: Environment<'_>) -> Result<Option<Place>, Failure> {
    let of = |name: &str| number(environment, &format!("SLURM_{name}"));
    let (Some(rank), Some(ranks), Some(local)) = (of("PROCID")?, of("STEP_NUM_TASKS")?, of("LOCALID")?) else {
        return Ok(None);
    };
    if ranks == 1 {
        return Ok(None);
    }
    let nodes = environment("SLURM_STEP_NODELIST").or_else(|| environment("SLURM_JOB_NODELIST"));
    let host = environment("MASTER_ADDR").or_else(|| nodes.map(|nodes| first_node(&nodes)));
    let host = host.ok_or_else(|| Failure::usage("no node list from srun: set MASTER_ADDR to the host of rank 0"))?;
    let own = [PORT, "MASTER_PORT"].into_iter().find_map(|name| port(environment, name).transpose()).transpose()?;
    let job = ["SLURM_JOB_ID", "SLURM_STEP_ID"].map(|name| environment(name).unwrap_or_default()).join(".");
    place(rank, ranks, local, host, own.unwrap_or_else(|| port_of(&job))).map(Some)
}

/// A port derived from the job id, equal in all its processes, below the ephemeral range.
fn port_of(job: &str) -> u16 {
    let mut hasher = DefaultHasher::new();
    job.hash(&mut hasher);
    20_000 + (hasher.finish() % 10_000) as u16
}

/// The first machine of a Slurm node list such as `node[03-07,12],other`.
fn first_node(list: &str) -> String {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().unwrap_or(list).to_string();
    };
    let number = rest.split([',', '-', ']']).next().unwrap_or("");
    let suffix = rest.split_once(']').map_or("", |(_, suffix)| suffix.split(',').next().unwrap_or(""));
    format!("{prefix}{number}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(gpus: Option<usize>, variables: &[(&str, &str)]) -> Result<Start, Failure> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        Start::read(gpus, &find)
    }

    #[track_caller]
    fn assert_rank(variables: &[(&str, &str)], rank: [usize; 3], at: (&str, u16)) {
        match start(None, variables).expect("a rank") {
            Start::Rank(place) => {
                assert_eq!([place.rank.rank, place.rank.ranks, place.local], rank);
                assert_eq!((place.host.as_str(), place.port), at);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn torchrun_is_understood_and_keeps_its_own_port() {
        let mut variables = vec![
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "29500"),
        ];
        assert_rank(&variables, [5, 8, 1], ("10.0.0.1", 29500));
        variables.push(("TORCHELASTIC_RUN_ID", "none"));
        assert_rank(&variables, [5, 8, 1], ("10.0.0.1", 29501));
        variables.push(("FIRECLAY_PORT", "4000"));
        assert_rank(&variables, [5, 8, 1], ("10.0.0.1", 4000));
        let message = start(Some(2), &variables).expect_err("two launchers").to_string();
        assert!(message.contains("--gpus 2 and torchrun"), "{message}");
    }

    #[test]
    fn an_allocation_of_slurm_is_no_launch_and_a_step_is_one() {
        let shell = [("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_JOB_ID", "77")];
        assert_eq!(start(None, &shell), Ok(Start::Alone));
        let interactive = [&shell[..], &[("SLURM_STEP_NUM_TASKS", "1")]].concat();
        assert_eq!(start(None, &interactive), Ok(Start::Alone));
        let step = [
            ("SLURM_PROCID", "9"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NUM_TASKS", "16"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "gpu[012-013,20]"),
        ];
        assert_rank(&step, [9, 16, 1], ("gpu012", port_of("77.0")));
    }

    #[test]
    fn slurms_lists_of_machines_begin_with_the_first() {
        for (list, first) in
            [("a,b", "a"), ("n[1-3]", "n1"), ("n[07,09]-ib,m", "n07-ib"), ("login,n[1-3]", "login"), ("solo", "solo")]
        {
            assert_eq!(first_node(list), first, "{list}");
        }
    }

    #[test]
    fn open_mpi_is_understood_on_one_machine_and_asks_for_an_address_on_several() {
        let mut variables = vec![
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("PMIX_NAMESPACE", "prterun-a-12@1"),
        ];
        assert_rank(&variables, [1, 4, 1], ("127.0.0.1", port_of("prterun-a-12@1")));
        variables[3].1 = "2";
        let message = start(None, &variables).expect_err("no address").to_string();
        assert!(message.contains("MASTER_ADDR"), "{message}");
    }

    #[test]
    fn a_pod_of_kubeflow_is_a_machine_with_as_many_ranks_as_gpus() {
        let pod = [("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "job-master-0"), ("MASTER_PORT", "23456")];
        assert_rank(&pod, [1, 3, 0], ("job-master-0", 23456));
        let at = Some(("job-master-0".to_string(), 23456));
        assert_eq!(start(Some(4), &pod), Ok(Start::Launch { count: 4, first: 4, all: 12, at }));
    }

    #[test]
    fn gpus_alone_start_as_many_ranks_and_these_do_not_start_more() {
        assert_eq!(start(Some(3), &[]), Ok(Start::Launch { count: 3, first: 0, all: 3, at: None }));
        assert_eq!(start(Some(1), &[]), Ok(Start::Alone));
        let child = [
            (WATCHED, "word"),
            ("RANK", "1"),
            ("WORLD_SIZE", "3"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "4001"),
        ];
        match start(Some(3), &child) {
            Ok(Start::Rank(Place { rank: Rank { rank: 1, ranks: 3 }, is_watched: true, word, .. })) => {
                assert_eq!(word, "word")
            }
            other => panic!("{other:?}"),
        }
    }
}

/* Lets a program see an older processor: CPUID answers without some of its features.
 *
 * Preloaded (LD_PRELOAD) into a program and its children on x86-64 Linux. The kernel makes
 * CPUID fault (arch_prctl, ARCH_SET_CPUID; threads and forks inherit it, exec ends it), and the
 * handler answers in its place. Libraries that choose their code by CPUID, as torch, oneDNN and
 * bitsandbytes do, then choose what they would choose there; the instructions themselves stay.
 *
 * PROCESSOR=avx512: AVX-512 without BF16, FP16 and AMX (as Ice Lake has it)
 * PROCESSOR=avx2:   no AVX-512 at all (as Haswell or Zen 3)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (UINT32_C(1) << (n))

static int without_avx512;
static struct sigaction theirs; /* what the program wants done at a true fault */

/* Intel SDM volume 2, CPUID: leaf 7, "structured extended feature flags". */
static void hide(uint32_t leaf, uint32_t subleaf, uint32_t *b, uint32_t *c, uint32_t *d, uint32_t *a) {
  if (leaf != 7) return;
  if (subleaf == 0) {
    *d &= ~(BIT(22) | BIT(23) | BIT(24) | BIT(25)); /* AMX-BF16, AVX512-FP16, AMX tile, AMX-INT8 */
    if (without_avx512) {
      *b &= ~(BIT(16) | BIT(17) | BIT(21)); /* F, DQ, IFMA */
      *b &= ~(BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31)); /* PF, ER, CD, BW, VL */
      *c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14)); /* VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ */
      *d &= ~(BIT(2) | BIT(3) | BIT(8)); /* 4VNNIW, 4FMAPS, VP2INTERSECT */
    }
  }
  if (subleaf == 1) {
    *a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23)); /* AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA */
    *d &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19)); /* VNNI-INT8, NE-CONVERT, AMX-COMPLEX, VNNI-INT16, AVX10 */
  }
}

static long let_cpuid_run(long yes) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, yes); }

static int really(int number, const struct sigaction *new, struct sigaction *old) {
  static int (*next)(int, const struct sigaction *, struct sigaction *);
  if (!next) next = dlsym(RTLD_NEXT, "sigaction");
  return next(number, new, old);
}

static void on_fault(int number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const uint8_t *at = (const uint8_t *)registers[REG_RIP];
  if (info->si_code == SI_KERNEL && at[0] == 0x0f && at[1] == 0xa2) { /* the opcode of CPUID */
    uint32_t a = registers[REG_RAX], b, c = registers[REG_RCX], d;
    uint32_t leaf = a, subleaf = c;
    let_cpuid_run(1);
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    let_cpuid_run(0);
    hide(leaf, subleaf, &b, &c, &d, &a);
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
  } else if (theirs.sa_flags & SA_SIGINFO) {
    theirs.sa_sigaction(number, info, context);
  } else if (theirs.sa_handler == SIG_DFL) {
    struct sigaction end = {.sa_handler = SIG_DFL};
    really(number, &end, NULL);
    raise(number);
  } else if (theirs.sa_handler != SIG_IGN) {
    theirs.sa_handler(number);
  }
}

/* The program may set a handler of its own (Python's faulthandler does): it is called at true
 * faults, and ours stays. Nor may a thread block the signal, for then CPUID would end it. */
int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
  if (number != SIGSEGV) return really(number, new, old);
  if (old) *old = theirs;
  if (new) theirs = *new;
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
  struct sigaction new = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
  return sigaction(number, &new, &old) ? SIG_ERR : old.sa_handler;
}

static int mask(const char *name, int how, const sigset_t *set, sigset_t *old) {
  int (*next)(int, const sigset_t *, sigset_t *) = dlsym(RTLD_NEXT, name);
  sigset_t but_ours;
  if (!set || how == SIG_UNBLOCK) return next(how, set, old);
  but_ours = *set;
  sigdelset(&but_ours, SIGSEGV);
  return next(how, &but_ours, old);
}

int pthread_sigmask(int how, const sigset_t *set, sigset_t *old) {
  return mask("pthread_sigmask", how, set, old);
}

int sigprocmask(int how, const sigset_t *set, sigset_t *old) {
  return mask("sigprocmask", how, set, old);
}

__attribute__((constructor)) static void start(void) {
  /* No SA_ONSTACK: a thread's alternate stack may be too small for a frame with AVX-512. */
  struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
  const char *processor = getenv("PROCESSOR");
  without_avx512 = processor && !strcmp(processor, "avx2");
  really(SIGSEGV, &ours, &theirs);
  if (let_cpuid_run(0)) {
    fputs("this kernel or processor cannot make CPUID fault: no other one can be pretended\n", stderr);
    _exit(2);
  }
}

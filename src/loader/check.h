/* loader/check: may this file be opened as a plugin, and is what it returns a plugin? Answers in sentences. A plugin is
 * trusted code: these checks keep out what somebody else may have put there and what cannot work; they do not contain a
 * plugin that was let in. It must not know of search paths or of what is loaded already. */
#ifndef DDL_LOADER_CHECK_H
#define DDL_LOADER_CHECK_H

#include "../base.h"

#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#define DDL__PLUGIN_NAME_BYTES 48 /* with the NUL */
#define DDL__PLUGIN_REASON_BYTES 800

/* What comes of looking at a candidate. Absent and declined are normal; refused deserves a warning. */
typedef enum ddl__plugin_verdict {
    DDL__PLUGIN_USABLE,
    DDL__PLUGIN_ABSENT,
    DDL__PLUGIN_DECLINED, /* it says itself that it cannot work on this machine */
    DDL__PLUGIN_REFUSED
} ddl__plugin_verdict;

/* Who may own a plugin and its folder besides root. */
typedef struct ddl__plugin_owners {
    uid_t self;
    uid_t program; /* owns the running executable, so that this uid decides already what the process does */
} ddl__plugin_owners;

static ddl__plugin_verdict __attribute__((format(printf, 2, 3))) ddl__plugin_refuse(ddl__text *reason,
                                                                                  const char *format, ...) {
    char line[DDL__PLUGIN_REASON_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    ddl__text_add(reason, "%s", line);
    return DDL__PLUGIN_REFUSED;
}

/* [a-z][a-z0-9_]*: the name becomes part of a file's name and of a symbol's. */
static bool ddl__plugin_name_ok(const char *name) {
    size_t bytes = strlen(name);
    return bytes > 0 && bytes < DDL__PLUGIN_NAME_BYTES && name[0] >= 'a' && name[0] <= 'z' &&
           strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == bytes;
}

#ifndef DDL_NO_PLUGINS /* what is checked of a file */
/* The NAME of a file called libddl-NAME.so. */
static bool ddl__plugin_name_of(const char *path, char out_name[DDL__PLUGIN_NAME_BYTES]) {
    const char *slash = strrchr(path, '/');
    const char *base = slash != NULL ? slash + 1 : path;
    size_t bytes = strlen(base);
    if (strncmp(base, "libddl-", 7) != 0 || bytes <= 10 || strcmp(base + bytes - 3, ".so") != 0 ||
        bytes - 10 >= DDL__PLUGIN_NAME_BYTES) {
        return false;
    }
    memcpy(out_name, base + 7, bytes - 10);
    out_name[bytes - 10] = '\0';
    return ddl__plugin_name_ok(out_name);
}

/* root and this user can change this process anyway. */
static bool ddl__plugin_owner_ok(const ddl__plugin_owners *owners, uid_t uid) {
    return uid == 0 || uid == owners->self || uid == owners->program;
}

/* The folder that holds the file, and all above it up to the root. Whoever may write the folder may exchange the file;
 * whoever may write one above may exchange the folder, unless the sticky bit (as on /tmp) keeps it to its owner.
 * path is absolute and free of links; it is cut here at its slashes. */
static ddl__plugin_verdict ddl__plugin_check_folders(const ddl__plugin_owners *owners, char *path,
                                                     ddl__text *reason) {
    bool direct = true;
    for (char *slash = strrchr(path, '/'); slash != NULL; slash = strrchr(path, '/'), direct = false) {
        *slash = '\0';
        const char *folder = path[0] != '\0' ? path : "/";
        struct stat info;
        if (stat(folder, &info) != 0) {
            return ddl__plugin_refuse(reason, "folder %s: %s", folder, strerror(errno));
        }
        bool sticky = (info.st_mode & S_ISVTX) != 0;
        if ((info.st_mode & S_IWOTH) != 0 && (direct || !sticky)) {
            return ddl__plugin_refuse(reason, "anybody may write its folder %s; chmod o-w it", folder);
        }
        if (direct && !ddl__plugin_owner_ok(owners, info.st_uid)) {
            return ddl__plugin_refuse(reason, "its folder %s belongs to uid %u, which is neither root nor this user",
                                      folder, (unsigned)info.st_uid);
        }
    }
    return DDL__PLUGIN_USABLE;
}

/* On the opened file, not on its path. Group-writable is allowed: shared software folders of a cluster are. */
static ddl__plugin_verdict ddl__plugin_check_owner(const ddl__plugin_owners *owners, const struct stat *info,
                                                   ddl__text *reason) {
    if (!S_ISREG(info->st_mode)) {
        return ddl__plugin_refuse(reason, "it is not a regular file");
    }
    if ((info->st_mode & S_IWOTH) != 0) {
        return ddl__plugin_refuse(reason, "anybody may write this file; chmod o-w it");
    }
    if (!ddl__plugin_owner_ok(owners, info->st_uid)) {
        return ddl__plugin_refuse(reason, "it belongs to uid %u, which is neither root nor this user",
                                  (unsigned)info->st_uid);
    }
    return DDL__PLUGIN_USABLE;
}

/* What this program was compiled for, 0 when this list does not have it (then dlopen decides). */
#if defined(__x86_64__)
#define DDL__ELF_MACHINE EM_X86_64
#elif defined(__aarch64__)
#define DDL__ELF_MACHINE EM_AARCH64
#elif defined(__powerpc64__)
#define DDL__ELF_MACHINE EM_PPC64
#elif defined(__s390x__)
#define DDL__ELF_MACHINE EM_S390
#elif defined(__riscv)
#define DDL__ELF_MACHINE EM_RISCV
#else
#define DDL__ELF_MACHINE 0
#endif

/* dlopen would say some of this, but for another machine it says "no such file or directory". */
static ddl__plugin_verdict ddl__plugin_check_elf_head(const Elf64_Ehdr *head, ddl__text *reason) {
    const uint16_t probe = 1; /* its first byte shows this processor's byte order */
    int order = *(const uint8_t *)&probe == 1 ? ELFDATA2LSB : ELFDATA2MSB;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) != 0) {
        return ddl__plugin_refuse(reason, "it is not a shared object (no ELF header)");
    }
    if (head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_ident[EI_DATA] != order) {
        return ddl__plugin_refuse(reason, "wrong ELF class or byte order: it is made for another kind of processor");
    }
    if (DDL__ELF_MACHINE != 0 && head->e_machine != DDL__ELF_MACHINE) {
        return ddl__plugin_refuse(reason, "it is made for another processor (ELF machine %u, this program is %u)",
                                  head->e_machine, (unsigned)DDL__ELF_MACHINE);
    }
    if (head->e_type != ET_DYN || head->e_phentsize != sizeof(Elf64_Phdr)) {
        return ddl__plugin_refuse(reason, "it is an ELF file, but not a shared object");
    }
    return DDL__PLUGIN_USABLE;
}

/* dlopen maps the segments and then reads them, so that a file cut short ends the process with SIGBUS: all segments
 * must lie inside the file. glibc checks the headers only. */
static ddl__plugin_verdict ddl__plugin_check_elf(int fd, uint64_t file_bytes, ddl__text *reason) {
    Elf64_Ehdr head;
    if (pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head) {
        return ddl__plugin_refuse(reason, "it is too short to be a shared object (%llu bytes)",
                                  (unsigned long long)file_bytes);
    }
    ddl__plugin_verdict verdict = ddl__plugin_check_elf_head(&head, reason);
    for (uint32_t i = 0; verdict == DDL__PLUGIN_USABLE && i < head.e_phnum; i++) {
        Elf64_Phdr segment;
        uint64_t at = i * sizeof segment;
        bool inside = head.e_phoff <= file_bytes && at < file_bytes - head.e_phoff &&
                      pread(fd, &segment, sizeof segment, (off_t)(head.e_phoff + at)) == (ssize_t)sizeof segment &&
                      (segment.p_type == PT_NULL || (segment.p_offset <= file_bytes &&
                                                     segment.p_filesz <= file_bytes - segment.p_offset));
        if (!inside) {
            verdict = ddl__plugin_refuse(reason, "it is truncated: it ends after %llu bytes, inside segment %u of %u",
                                         (unsigned long long)file_bytes, i + 1, head.e_phnum);
        }
    }
    return verdict;
}

/* All that can be said of a file before any of its code runs. out_real is the path with links resolved: what was
 * checked is what gets opened, and no stranger may write to any part of that path. */
static ddl__plugin_verdict ddl__plugin_check_file(const ddl__plugin_owners *owners, const char *path,
                                                  char out_real[PATH_MAX], ddl__text *reason) {
    if (realpath(path, out_real) == NULL) {
        int absent = errno == ENOENT || errno == ENOTDIR;
        ddl__text_add(reason, "%s", absent ? "no such file" : strerror(errno));
        return absent ? DDL__PLUGIN_ABSENT : DDL__PLUGIN_REFUSED;
    }
    int fd = open(out_real, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* it may turn out to be a fifo */
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        ddl__plugin_refuse(reason, "it cannot be read: %s", strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return DDL__PLUGIN_REFUSED;
    }
    ddl__plugin_verdict verdict = ddl__plugin_check_owner(owners, &info, reason);
    if (verdict == DDL__PLUGIN_USABLE) {
        char folders[PATH_MAX];
        memcpy(folders, out_real, PATH_MAX);
        verdict = ddl__plugin_check_folders(owners, folders, reason);
    }
    if (verdict == DDL__PLUGIN_USABLE) {
        verdict = ddl__plugin_check_elf(fd, (uint64_t)info.st_size, reason);
    }
    close(fd);
    return verdict;
}
#endif

/* The first required member of a table that is missing, or NULL. A member counts as there when the table's own size
 * covers it and it is not NULL: what was compiled against an older header ends earlier. */
#define DDL__NEED(table, member)                                                                                       \
    if (!DDL_HAS(table, member)) {                                                                                     \
        return #member;                                                                                                \
    }

static const char *ddl__transport_lacks(const ddl_transport *transport) {
    DDL__NEED(transport, open)
    DDL__NEED(transport, close)
    DDL__NEED(transport, address)
    DDL__NEED(transport, add_peer)
    DDL__NEED(transport, send)
    DDL__NEED(transport, progress)
    /* A simulation or a futex sleeps its own way: one of the two ways to sleep is enough. */
    if (!DDL_HAS(transport, wait)) {
        DDL__NEED(transport, arm)
    }
    DDL__NEED(transport, peer_dead)
    return NULL;
}

static const char *ddl__device_lacks(const ddl_device *device) {
    DDL__NEED(device, open)
    DDL__NEED(device, close)
    DDL__NEED(device, count)
    DDL__NEED(device, owner)
    DDL__NEED(device, alloc)
    DDL__NEED(device, free)
    DDL__NEED(device, copy)
    DDL__NEED(device, event_record)
    DDL__NEED(device, event_test)
    DDL__NEED(device, event_free)
    return NULL;
}
#undef DDL__NEED

/* Optional members that are of use only together. */
typedef struct ddl__member {
    const char *name;
    bool there;
} ddl__member;

#define DDL__MEMBER(table, member) {#member, DDL_HAS(table, member)}

/* The first that is missing where others of its family are there, or NULL. */
static const char *ddl__family_lacks(const ddl__member *family, size_t count) {
    const char *missing = NULL;
    size_t there = 0;
    for (size_t i = 0; i < count; i++) {
        there += family[i].there;
        missing = missing == NULL && !family[i].there ? family[i].name : missing;
    }
    return there > 0 ? missing : NULL;
}

static const char *ddl__transport_half(const ddl_transport *t) {
    const ddl__member native[] = {DDL__MEMBER(t, native_open), DDL__MEMBER(t, native_close),
                                  DDL__MEMBER(t, native_cost_ns), DDL__MEMBER(t, native_start),
                                  DDL__MEMBER(t, native_test), DDL__MEMBER(t, native_cancel)};
    const ddl__member memory[] = {DDL__MEMBER(t, memory_alloc), DDL__MEMBER(t, memory_free)};
    const ddl__member in_place[] = {DDL__MEMBER(t, peek), DDL__MEMBER(t, taken)};
    const ddl__member out_place[] = {DDL__MEMBER(t, reserve), DDL__MEMBER(t, publish)};
    const char *lacks = ddl__family_lacks(native, DDL__COUNT_OF(native));
    lacks = lacks != NULL ? lacks : ddl__family_lacks(memory, DDL__COUNT_OF(memory));
    lacks = lacks != NULL ? lacks : ddl__family_lacks(in_place, DDL__COUNT_OF(in_place));
    return lacks != NULL ? lacks : ddl__family_lacks(out_place, DDL__COUNT_OF(out_place));
}

static const char *ddl__device_half(const ddl_device *d) {
    const ddl__member host[] = {DDL__MEMBER(d, host_alloc), DDL__MEMBER(d, host_free)};
    const ddl__member stream[] = {DDL__MEMBER(d, stream_make), DDL__MEMBER(d, stream_free)};
    const ddl__member gate[] = {DDL__MEMBER(d, gate_put), DDL__MEMBER(d, gate_open)};
    const char *lacks = ddl__family_lacks(host, DDL__COUNT_OF(host));
    lacks = lacks != NULL ? lacks : ddl__family_lacks(stream, DDL__COUNT_OF(stream));
    return lacks != NULL ? lacks : ddl__family_lacks(gate, DDL__COUNT_OF(gate));
}
#undef DDL__MEMBER

static ddl__plugin_verdict ddl__plugin_refuse_half(const char *what, const char *lacks, ddl__text *reason) {
    return ddl__plugin_refuse(reason, "its %s lacks the member %s, but has others that are of use only with it", what,
                              lacks);
}

/* What the core relies on beyond the functions. */
static ddl__plugin_verdict ddl__plugin_check_transport(const ddl_transport *transport, ddl__text *reason) {
    const char *lacks = ddl__transport_lacks(transport);
    if (lacks != NULL) {
        return ddl__plugin_refuse(reason, "its transport lacks the required member %s (its table has %u bytes)", lacks,
                                  transport->size);
    }
    if (ddl__transport_half(transport) != NULL) {
        return ddl__plugin_refuse_half("transport", ddl__transport_half(transport), reason);
    }
    if ((transport->flags & DDL_TRANSPORT_ORDERED) == 0) {
        return ddl__plugin_refuse(reason, "its transport does not promise order (DDL_TRANSPORT_ORDERED)");
    }
    if (transport->max_payload_bytes < DDL_MESSAGE_PAYLOAD_BYTES) {
        return ddl__plugin_refuse(reason, "its transport takes payloads of at most %llu bytes "
                                  "(max_payload_bytes); messages have up to %u",
                                  (unsigned long long)transport->max_payload_bytes, DDL_MESSAGE_PAYLOAD_BYTES);
    }
    return DDL__PLUGIN_USABLE;
}

/* The table as ABI 1 began: what was appended since is optional. */
#define DDL__PLUGIN_V1_BYTES (offsetof(ddl_plugin, device) + sizeof(const ddl_device *))

/* size and abi come first in every version of the table, so that they can be read whatever the rest is. */
static ddl__plugin_verdict ddl__plugin_check_table(const ddl_plugin *plugin, const char *name, ddl__text *reason) {
    if (plugin->abi != DDL_PLUGIN_ABI) {
        return ddl__plugin_refuse(reason, "it was built for plugin ABI %u, this program has %u; build it again with "
                                  "this program's ddl.h", plugin->abi, DDL_PLUGIN_ABI);
    }
    if (plugin->size < DDL__PLUGIN_V1_BYTES) {
        return ddl__plugin_refuse(reason, "its table says it has %u bytes, fewer than the %u of ABI %u", plugin->size,
                                  (unsigned)DDL__PLUGIN_V1_BYTES, DDL_PLUGIN_ABI);
    }
    if (plugin->name == NULL || strcmp(plugin->name, name) != 0) {
        return ddl__plugin_refuse(reason, "its table is named \"%.40s\", the file \"%s\"",
                                  plugin->name != NULL ? plugin->name : "(null)", name);
    }
    if (plugin->transport == NULL && plugin->device == NULL) {
        return ddl__plugin_refuse(reason, "it offers neither a transport nor a device");
    }
    if (plugin->device != NULL && ddl__device_lacks(plugin->device) != NULL) {
        return ddl__plugin_refuse(reason, "its device lacks the required member %s (its table has %u bytes)",
                                  ddl__device_lacks(plugin->device), plugin->device->size);
    }
    if (plugin->device != NULL && ddl__device_half(plugin->device) != NULL) {
        return ddl__plugin_refuse_half("device", ddl__device_half(plugin->device), reason);
    }
    return plugin->transport != NULL ? ddl__plugin_check_transport(plugin->transport, reason) : DDL__PLUGIN_USABLE;
}

#endif /* DDL_LOADER_CHECK_H */
